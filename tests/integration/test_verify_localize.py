"""verify localize on real runs, as a user starts it."""

import json
from pathlib import Path

import pytest

from tests.support.commands import run_command
from tests.support.paths import REPO

COMPARE = ["--config", REPO / "configs" / "debug" / "compare.toml"]
TINY = ["--model.name", "mixtral", "--training.steps", "3"]


def localize(*words: object, out: Path) -> tuple[int, str]:
    done = run_command("verify", "localize", *words, "--out", out)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_another_choice_of_experts_is_named(tmp_path: Path):
    forced = "ranks=1 --debug.moe_force_load_balance true"
    sides = ["--baseline", "ranks=1", "--candidate", forced, "--step", "1", "--repeats", "0"]
    code, told = localize(*COMPARE, *sides, *TINY, out=tmp_path / "out")
    assert code == 1, told
    assert "first difference: layers.0.moe.router, choice (forward)" in told
    assert "equal before it: what the step reads; parameters at the step's start" in told
    assert "a tie" not in told
    (found,) = json.loads((tmp_path / "out" / "finding.json").read_text())
    assert found["step"] == 1 and found["named"]


@pytest.mark.full
def test_another_learning_rate_is_named_in_the_step_where_it_shows(tmp_path: Path):
    sides = ["--baseline", "ranks=1", "--candidate", "ranks=2 --optimizer.lr 2.9e-3"]
    code, told = localize(*COMPARE, *sides, *TINY, out=tmp_path / "out")
    assert code == 1, told
    assert "first other bits at step 1" in told or "first other bits at step 2" in told
    assert ", update of weight (what the optimizer adds)" in told and "ratio 0.96666" in told


@pytest.mark.full
def test_a_layout_alone_is_rounding(tmp_path: Path):
    sides = ["--baseline", "ranks=1", "--candidate", "layout=tp=2"]
    code, told = localize(*COMPARE, *sides, *TINY, "--step", "2", out=tmp_path / "out")
    assert code == 3 and "step 2: nothing differs beyond rounding" in told, told
