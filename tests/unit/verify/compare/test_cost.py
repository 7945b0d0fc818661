"""Time and memory of known runs against limits."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from titan_moe.config.errors import ConfigError
from titan_moe.verify.compare.cost import MEMORY, PAIRS, TIME, CostCheck, measure
from titan_moe.verify.compare.outcome import Verdict
from titan_moe.verify.compare.records import read_run

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
    word = "within the limit" if verdict is None else verdict.value
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
        {"step": n, "loss": 1, "tokens": 64 * n, "tokens_per_second": 64 / s, "memory/peak_gib": s}
        for n, s in enumerate(seconds, 1)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert measure([read_run(tmp_path)]) == {TIME: [0.5], MEMORY: [0.5]}
    path.write_text(path.read_text().replace("memory/", "other/"))
    with pytest.raises(ConfigError, match="has no 'memory/peak_gib'"):
        measure([read_run(tmp_path)])
