"""Time and memory of known runs against limits."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.support.stub_runs import CAPABILITY, Stubbed, calls, num_counted, silent, trial
from titan_moe.config.errors import ConfigError
from titan_moe.verify.compare import goldens
from titan_moe.verify.compare.cost import MEMORY, PAIRS, TIME, CostCheck, measure
from titan_moe.verify.compare.records import Verdict, read_run
from titan_moe.verify.compare.run_spec import RunSpec
from titan_moe.verify.compare.runner import compare, update_golden

NOISY = Verdict.COST_UNJUDGED


@pytest.mark.parametrize(
    ("baseline", "candidate", "verdict"),
    [
        ([1.0, 1.01, 0.99], [1.0, 0.99, 1.02], None),
        ([1.0, 1.01, 0.99], [1.06, 1.07, 1.06], Verdict.TOO_SLOW),
        ([1.0, 1.01, 0.99], [1.04, 1.05, 1.03], None),
        ([1.0, 1.12, 1.0], [1.0, 1.0, 1.0], None),
        ([1.0, 1.12, 1.0], [1.06, 1.06, 1.06], NOISY),
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.12], NOISY),
        ([1.0, 1.12, 1.0], [1.3, 1.3, 1.3], Verdict.TOO_SLOW),
        ([1.0], [1.06], Verdict.TOO_SLOW),
    ],
)
def test_a_limit_is_judged_where_equal_runs_agree_or_all_pairs_do(baseline, candidate, verdict):
    check = CostCheck(TIME, baseline, candidate, 0.05)
    assert check.verdict is verdict
    grown = CostCheck(MEMORY, baseline, candidate, 0.05).verdict
    assert grown is {Verdict.TOO_SLOW: Verdict.TOO_LARGE}.get(verdict, verdict)
    word = "within the limit" if verdict is None else verdict.words
    assert f"(limit 5 %): {word}" in check.line()
    several = f"; the baseline's {len(baseline)} runs differ by" in check.line()
    assert several is (len(baseline) > 1)


@pytest.mark.parametrize("noise", [0.01, 0.02, 0.05, 0.1])
def test_noise_of_any_size_rarely_gives_a_wrong_verdict(noise: float):
    """Equal code too slow, or a slow-down of twice the limit passed: below 2 % each."""
    rng, wrong = np.random.default_rng(0), Counter[float]()
    for slowdown, unwanted in ((1.0, Verdict.TOO_SLOW), (1.1, None)):
        for runs in rng.normal(1, noise, (2000, 2, PAIRS)):
            check = CostCheck(TIME, runs[0].tolist(), (slowdown * runs[1]).tolist(), 0.05)
            wrong[slowdown] += check.verdict is unwanted
    assert max(wrong.values()) < 0.02 * 2000, wrong


def test_a_slow_step_and_the_warm_up_leave_a_run_s_figures_as_they_are(tmp_path: Path):
    seconds = [90.0, 2, 2, 2, 2] + [0.5] * 5 + [40.0]
    lines = [
        {"step": n, "data": 1, "tokens": 64 * n, "tokens_per_second": 64 / s, "memory/peak_gib": s}
        for n, s in enumerate(seconds, 1)
    ]
    path = tmp_path / "metrics.jsonl"
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "config.toml").touch()
    path.write_text("\n".join(map(json.dumps, lines)))
    assert measure([read_run(tmp_path)]) == {TIME: [0.5], MEMORY: [0.5]}


LIMITS = {"steps": 12, "max_slowdown": 0.1, "max_memory_growth": 0.1}
SLOW = "--activation_checkpoint.mode full"


def test_time_is_judged_by_runs_in_turn_that_are_all_trained_now(launcher):
    within = compare(trial(baseline="revision=main", **LIMITS), launcher, silent)
    assert within.outcome is Verdict.IDENTICAL and not any(c.verdict for c in within.costs)
    before, again = len(calls(launcher)), trial(SLOW, **LIMITS)
    shared = Stubbed(launcher.folder, shared=launcher.folder / "runs")
    for launching in (launcher, launcher, shared):
        found = compare(again, launching, silent)
        assert found.verdict is Verdict.IDENTICAL and found.outcome is Verdict.TOO_SLOW
        assert [cost.growth for cost in found.costs] == pytest.approx([0.3, 0.3])
        assert found.lines()[0] == "test: identical bits, but too slow"
        assert sum(": too large;" in line for line in found.lines()) == 1
        assert found.as_json()["exit_code"] == 6 and found.as_json()["curves"] == "identical"
    runs = [run["folder"] for run in calls(launcher)[before:]]
    assert [name for name in runs if name in ("baseline", "candidate")] == runs[-6:] * 3
    assert runs[-6:] == ["baseline", "candidate"] * 3 and num_counted(again, launcher) == 6


def test_memory_alone_takes_one_pair_and_other_curves_stay_different(launcher):
    limits = {**LIMITS, "max_slowdown": None}
    found = compare(trial(SLOW, **limits), launcher, silent)
    assert found.outcome is Verdict.TOO_LARGE and len(calls(launcher)) == 3
    found = compare(trial(f"{SLOW} --optimizer.lr 6e-3", **limits), launcher, silent)
    assert found.outcome is Verdict.DIFFERENT and "too large" in " ".join(found.lines()[1:])


def test_a_gpu_s_golden_holds_costs_for_candidates_on_the_same_gpu(launcher, monkeypatch):
    facts = {"device": "NVIDIA H100", "capability": CAPABILITY}
    script = launcher.folder.parent / "code" / "run_train.sh"
    named = '"device": "NVIDIA H100", "layout": {}'
    script.write_text(script.read_text().replace('"device": "cpu"', named))
    monkeypatch.setattr(goldens, "describe_device", lambda _: facts)
    path = update_golden(trial(steps=12), launcher, launcher.folder / "g", "a first one", silent)
    no_config = RunSpec(overrides=(("training.steps", "12"),))
    against, before = trial(SLOW, str(path), no_config, max_slowdown=0.1), len(calls(launcher))
    found = compare(against, launcher, silent)
    assert found.outcome is Verdict.TOO_SLOW and num_counted(against, launcher) == 3
    assert len(calls(launcher)) == before + 3
    monkeypatch.setattr(goldens, "describe_device", lambda _: {**facts, "device": "NVIDIA H200"})
    with pytest.raises(ConfigError, match=r"this machine is torch-.*H200"):
        compare(against, launcher, silent)
