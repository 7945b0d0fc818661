"""Suites: those of this repository can be run, and what is wrong with one is told."""

from pathlib import Path

import pytest

from tests.support.paths import REPO
from tests.support.verdict_cases import run
from titan_moe.config.checks.job import check
from titan_moe.config.errors import ConfigError
from titan_moe.config.parse import load_job
from titan_moe.models.hf import model_of_job
from titan_moe.verify.compare import suite as suite_module
from titan_moe.verify.compare.comparison import Comparison, Verdict
from titan_moe.verify.compare.control_runs import batch_words
from titan_moe.verify.compare.launch import TrainingError
from titan_moe.verify.compare.suite import Suite, entry_plan, load_suite, run_suite

SUITES = sorted((REPO / "configs" / "suites").glob("*.toml"))


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_every_suite_of_ours_names_legal_trainings(path: Path, monkeypatch):
    monkeypatch.chdir(REPO)
    suite = load_suite(path)
    assert any(entry.expect == "different" for entry in suite.comparison), "it cannot fail"
    if path.stem == "seed_8":  # Its file names two models: this one is for the GPUs.
        suite = load_suite(path, REPO / "configs" / "deepseek_v3" / "16B_8gpu.toml")
    for entry in suite.comparison:
        plan = entry_plan(entry)
        for side in (plan.baseline, plan.candidate):
            if side.path is not None or side.config is None:
                continue
            job = load_job([*side.file(), *side.arguments(*batch_words(side, side.job()))])
            assert not check(job, model_of_job(job.model), side.world_size)
            ranks = {"seed_8": 8, "8gpu": 8, "64gpu": 64}
            assert side.world_size == ranks.get(path.stem, side.world_size)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("description = 1", "description: Input should be a valid string"),
        ("x =", "is not valid TOML"),
        ('description = "x"\n[[comparison]]\nname = "a"\nstep = 3', "comparison.0.step: Extra"),
    ],
)
def test_what_is_no_suite_is_told(tmp_path: Path, text: str, told: str):
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_suite(tmp_path / "s.toml")
    assert any(told in line for line in caught.value.lines), caught.value.lines


def make_suite(**expects: str) -> Suite:
    entries = [{"name": name, "expect": expect} for name, expect in expects.items()]
    return Suite.model_validate({"description": "x", "comparison": entries})


@pytest.mark.parametrize(
    ("verdict", "good"),
    [
        (Verdict.IDENTICAL, {"identical", "inside"}),
        (Verdict.INSIDE, {"inside"}),
        (Verdict.DIFFERENT, {"different"}),
        (Verdict.UNJUDGED, set()),
    ],
)
def test_the_gate_accepts_what_was_expected(verdict, good, tmp_path: Path, monkeypatch):
    found = Comparison("x", run("a"), run("b"), verdict)
    monkeypatch.setattr(suite_module, "compare", lambda *_: found)
    monkeypatch.setattr(suite_module, "write_comparison", lambda *_: [])
    suite = make_suite(identical="identical", inside="inside", different="different")
    rows = list(run_suite(suite, tmp_path, print))
    assert {row.name for row in rows if row.ok} == good


def test_a_side_that_fails_is_a_row_and_stops_nothing(tmp_path: Path, monkeypatch):
    def fail(*_):
        raise TrainingError("candidate ended with exit code 1:\n  | last line")

    monkeypatch.setattr(suite_module, "compare", fail)
    rows = list(run_suite(make_suite(a="inside", b="different"), tmp_path, print))
    assert [row.ok for row in rows] == [False, False] and "last line" in rows[1].detail
