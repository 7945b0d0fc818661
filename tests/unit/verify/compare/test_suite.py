"""Suites: those of this repository can be run, and what is wrong with one is told."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.paths import REPO
from tests.support.refusals import refusals
from tests.support.stub_runs import Stubbed, calls, silent, trial
from tests.support.verdict_cases import run
from titan_moe.checks.job import check
from titan_moe.cli.main import main
from titan_moe.config.parse import load_job
from titan_moe.models.hf import model_of_job
from titan_moe.verify.compare import forecast as forecast_module
from titan_moe.verify.compare import suite as suite_module
from titan_moe.verify.compare.code_trees import CodeTree
from titan_moe.verify.compare.control_runs import batch_words
from titan_moe.verify.compare.cost import MEMORY, TIME, CostCheck
from titan_moe.verify.compare.forecast import Forecast, Training
from titan_moe.verify.compare.launch import Launcher, Place, TrainingError
from titan_moe.verify.compare.records import Verdict
from titan_moe.verify.compare.run_spec import RunSpec
from titan_moe.verify.compare.runner import compare
from titan_moe.verify.compare.suite import Suite, entry_trial, load_suite, run_suite
from titan_moe.verify.compare.verdict import Comparison

COSTS = {
    Verdict.TOO_SLOW: CostCheck(TIME, [1.0], [1.3], 0.05),
    Verdict.TOO_LARGE: CostCheck(MEMORY, [1.0], [1.3], 0.05),
    Verdict.COST_UNJUDGED: CostCheck(TIME, [1.0, 1.1], [1.1, 1.1], 0.05),
}
SUITES = sorted((REPO / "configs" / "suites").glob("*.toml"))


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_every_suite_of_ours_names_legal_trainings(path: Path, monkeypatch):
    monkeypatch.chdir(REPO)
    suite = load_suite(path)
    assert any(entry.expect == "different" for entry in suite.comparison), "it cannot fail"
    if path.stem == "seed_8":  # Its file names two models: this one is for the GPUs.
        suite = load_suite(path, REPO / "configs" / "deepseek_v3" / "debugmodel.toml")
    for entry in suite.comparison:
        trial = entry_trial(entry)
        for side in (trial.baseline, trial.candidate):
            if side.path is not None or side.config is None:
                continue
            job = load_job([*side.file(), *side.arguments(*batch_words(side, side.job()))])
            assert not check(job, model_of_job(job.model), side.world_size)
            ranks = {"seed_8": {2, 8}, "regression_8": {8}, "8gpu": {8}, "64gpu": {64}}
            assert side.world_size in ranks.get(path.stem, {side.world_size})


NAMED = '[[comparison]]\nname = "a"\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("description = 1", "description = 1 (s.toml): must be a valid string"),
        ("x =", "is not valid TOML"),
        ("defaults = 3", "defaults = 3 (s.toml): must be a table"),
        ("comparison = [1]", "comparison.0 = 1 (s.toml): must be a table"),
        (
            f"{NAMED}stepp = 3",
            "stepp = 3 (s.toml, comparison 'a'): no such key; did you mean steps?",
        ),
        (
            f"{NAMED}max_slowdown = 5",
            "max_slowdown = 5 (s.toml, comparison 'a'): must be less than",
        ),
        ("[[comparison]]\nsteps = 1", "name (s.toml, comparison 1): is required"),
        (f"defaults.x = 1\n{2 * NAMED}", "x = 1 (s.toml, defaults): no such key"),
    ],
)
def test_each_mistake_in_a_suite_is_named_once(tmp_path: Path, text: str, told: str):
    (tmp_path / "s.toml").write_text(text)
    lines = [line.replace(f"{tmp_path}/", "") for line in refusals(load_suite, tmp_path / "s.toml")]
    assert sum(told in line for line in lines) == 1, lines


def make_suite(**expects: str) -> Suite:
    limits = {"max_slowdown": 0.05, "max_memory_growth": 0.05}
    entries = [{"name": name, "expect": expect, **limits} for name, expect in expects.items()]
    return Suite.model_validate({"description": "x", "comparison": entries})


def runner(folder: Path, compare: Callable[[], Comparison]) -> Any:
    return SimpleNamespace(launcher=Launcher(folder), compare=compare)


BAD_SUITE = """
description = "x"
[defaults]
config = "configs/debug/compare.toml"
baseline = "ranks=1"
repeats = 0
[[comparison]]
name = "good"
candidate = "layout=tp=2"
[[comparison]]
name = "file"
config = "no.toml"
[[comparison]]
name = "key"
repeats = 2
baseline = "revision=nowhere"
candidate = "--optimizer.lrr 1"
[[comparison]]
name = "golden"
baseline = "no/golden"
"""


def test_a_suite_is_refused_with_every_entry_that_cannot_run(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.chdir(REPO)
    (tmp_path / "s.toml").write_text(BAD_SUITE)
    out = tmp_path / "out"
    assert main(["verify", "suite", str(tmp_path / "s.toml"), "--out", str(out)]) == 2
    told = capfd.readouterr().err
    for line in ("file: .*no.toml", "key: .*repeats=2", "key: .*revision=nowhere", "key: .*lrr"):
        assert re.search(line, told), told
    assert re.search("golden: .*no/golden", told), told
    assert "good" not in told
    assert not (out / "runs").exists()


def test_a_dry_run_counts_what_comparisons_share_once_and_trains_nothing(
    tmp_path: Path, monkeypatch, capfd
):
    monkeypatch.chdir(REPO)
    out = tmp_path / "out"
    words = ["verify", "suite", "configs/suites/regression_8.toml", "--out", str(out)]
    assert main([*words, "--dry-run", "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)
    counted = [(row["trainings"], row["control runs"]) for row in rows]
    assert counted == [(2, 0), (9, 8), (6, 0), (2, 0), (10, 8), (11, 8), (1, 0)]
    assert {row["ranks"] for row in rows} == {"8"} and {row["steps"] for row in rows} == {"10"}
    assert not (out / "runs").exists()


def test_time_is_estimated_by_what_was_measured_or_by_an_assumed_share_of_the_peak(monkeypatch):
    """On 8 GPUs of 1e12 FLOP/s, 30 % of which are assumed."""
    monkeypatch.setattr(forecast_module, "peak_flops", lambda _: 1e12)

    def training(name: str, seconds: float | None = None) -> Training:
        place = Place(RunSpec(ranks=8), name, Path(name), name, [], seconds)
        return Training(place, steps=5, flops=8 * 0.3e12 * 3600)

    forecast = Forecast()
    forecast.add("x", [training("a"), training("b")])
    forecast.add("y", [training("a"), training("c")])
    assert [row["trainings"] for row in forecast.rows()] == [2, 1]
    assert "at most 3 h 0 min (24.0 GPU hours) if they reach 30% of this GPU" in forecast.line()
    forecast.add("z", [training("d", seconds=1800)])
    assert "1 more are found; at most 1 h 30 min (12.0 GPU hours)" in forecast.line()


@pytest.mark.parametrize(
    ("verdict", "good"),
    [
        (Verdict.IDENTICAL, {"identical", "inside"}),
        (Verdict.INSIDE, {"inside"}),
        (Verdict.DIFFERENT, {"different"}),
        (Verdict.UNJUDGED, set()),
        (Verdict.TOO_SLOW, {"slow"}),
        (Verdict.TOO_LARGE, {"large"}),
        (Verdict.COST_UNJUDGED, set()),
    ],
)
def test_the_gate_accepts_what_was_expected(verdict, good, tmp_path: Path, monkeypatch):
    found = Comparison("x", run("a"), run("b"), verdict)
    if (cost := COSTS.get(verdict)) is not None:
        found = Comparison("x", run("a"), run("b"), Verdict.INSIDE, costs=[cost])
    assert found.outcome is verdict
    monkeypatch.setattr(suite_module, "write_comparison", lambda *_: [])
    expects = {"slow": "too slow", "large": "too large"}
    suite = make_suite(identical="identical", inside="inside", different="different", **expects)
    rows = list(run_suite(suite, [runner(tmp_path, lambda: found)] * 5))
    assert {row.name for row in rows if row.ok} == good


def test_a_side_that_fails_is_a_row_and_stops_nothing(tmp_path: Path):
    def fail():
        raise TrainingError("candidate ended with exit code 1:\n  | last line")

    runners = [runner(tmp_path, fail)] * 2
    rows = list(run_suite(make_suite(a="inside", b="different"), runners))
    assert [row.ok for row in rows] == [False, False] and "last line" in rows[1].detail


def test_suite_s_comparisons_share_runs(launcher):
    (launcher.folder / "code").parent.mkdir()
    (launcher.folder / "code").symlink_to(launcher.folder.parent / "code")
    for name in ("a", "b"):
        one = Stubbed(launcher.folder / name, shared=launcher.folder / "runs")
        compare(trial("layout=tp=2"), one, silent)
    assert len(calls(launcher)) == 11 and len(list((launcher.folder / "runs").iterdir())) == 11


def test_a_suite_s_pinned_trainings_are_numbered_and_follow_the_routes_of_its_baseline(launcher):
    told: list[str] = []
    launcher = replace(launcher, shared=launcher.folder / "runs")
    model, common = "--model.name mixtral", {"num_control_runs": 4, "pin_routing": True}
    found = compare(trial(f"layout=tp=2 {model}", model, **common), launcher, told.append)
    routes = {run["debug.routing_replay"] for run in calls(launcher)[7:]}
    assert routes == {f"{found.baseline.folder}/routes"}
    numbers = [int(line.split()[1]) for line in told if line.startswith("training ")]
    assert numbers == list(range(1, 12)) and "pinned/control/04: " in told[-1]


def test_a_run_has_the_folders_of_pythonpath_wherever_it_starts(launcher, monkeypatch):
    script = launcher.folder.parent / "code" / "run_train.sh"
    path = '"path": os.environ["PYTHONPATH"], "folder": '
    script.write_text(script.read_text().replace('"folder": ', path, 1))
    monkeypatch.chdir(launcher.folder.parent)
    monkeypatch.setenv("PYTHONPATH", f"{REPO}:/of/mine:plugins")
    compare(trial("layout=tp=2", num_control_runs=0), launcher, silent)
    own = f"{REPO}:/of/mine:{launcher.folder.parent / 'plugins'}"
    assert {each["path"] for each in calls(launcher)} == {own}


@pytest.mark.parametrize("package", [False, True])
def test_runs_of_an_edited_plug_in_are_trained_again(launcher, monkeypatch, package: bool):
    folder, name = launcher.folder.parent / "plugins", f"plug_in_of_a_suite_{package}"
    file = folder / name / "tables.py" if package else folder / f"{name}.py"
    file.parent.mkdir(parents=True)
    file.write_text("factor = 1\n")
    monkeypatch.syspath_prepend(folder)
    named = f"--job.imports {name}{'.tables' * package}"
    asked = trial(f"layout=tp=2 {named}", named, num_control_runs=0)
    for text, trained in (("factor = 1\n", 3), ("factor = 2\n", 6)):
        file.write_text(text)
        compare(asked, launcher, silent)
        compare(asked, launcher, silent)
        assert len(calls(launcher)) == trained


class OneCode(Stubbed):
    """Every revision is the stub, and has the same files."""

    def code(self, side: RunSpec) -> CodeTree:
        return CodeTree(self.folder.parent / "code", "the same", side.revision)


def test_two_sides_of_the_same_code_are_two_trainings(launcher):
    """The planted run is another one each time: one training would agree with itself."""
    script = launcher.folder.parent / "code" / "run_train.sh"
    right = "pinned = "
    text = script.read_text()
    assert text.count(right) == 1
    script.write_text(text.replace(right, f"factor *= 1 + len(folder.name) / 1000\n{right}"))
    one = OneCode(launcher.folder, shared=launcher.folder / "runs")
    found = compare(trial("", "revision=main", num_control_runs=0), one, silent)
    assert found.verdict is not Verdict.IDENTICAL and len(calls(launcher)) == 3
    compare(trial("", "revision=main", num_control_runs=0), one, silent)
    assert len(calls(launcher)) == 3  # And a command that is repeated trains nothing.
