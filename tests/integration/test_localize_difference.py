"""localize_difference.py on real runs, as a user starts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPO

SCRIPT = REPO / "scripts" / "localize_difference.py"
COMPARE = str(REPO / "configs" / "debug" / "compare.toml")
TINY = ["--set", "--model.name mixtral --training.steps 3"]


def localize(*words: str, out: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words, "--out", str(out)],
        cwd=REPO,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_another_choice_of_experts_is_named(tmp_path: Path):
    forced = "ranks=1 --debug.moe_force_load_balance true"
    sides = ["--baseline", "ranks=1", "--candidate", forced, "--step", "1", "--repeats", "0"]
    code, told = localize(COMPARE, *TINY, *sides, out=tmp_path / "out")
    assert code == 1, told
    assert "the runs part at: layers.0.moe.router, choice (forward)" in told
    assert "equal before it: what the step reads; parameters at the step's start" in told
    assert "a tie" not in told
    (found,) = json.loads((tmp_path / "out" / "finding.json").read_text())
    assert found["step"] == 1 and found["named"]


@pytest.mark.full
def test_another_learning_rate_is_named_in_the_step_where_it_shows(tmp_path: Path):
    sides = ["--baseline", "ranks=1", "--candidate", "ranks=2 --optimizer.lr 2.9e-3"]
    code, told = localize(COMPARE, *TINY, *sides, out=tmp_path / "out")
    assert code == 1, told
    assert "first other bits at step 1" in told or "first other bits at step 2" in told
    assert ", update of weight (what the optimizer adds)" in told and "ratio 0.96666" in told


@pytest.mark.full
def test_a_layout_alone_is_rounding(tmp_path: Path):
    sides = ["--baseline", "ranks=1", "--candidate", "layout=tp=2"]
    code, told = localize(COMPARE, *TINY, *sides, "--step", "2", out=tmp_path / "out")
    assert code == 3 and "step 2: nothing differs beyond rounding" in told, told


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--baseline", "revision=nowhere"], "git knows no such commit"),
        (["--candidate", "tests"], "has no config.toml and run.json"),
    ],
)
def test_what_cannot_be_run_gets_a_line(
    tmp_path: Path, words: list[str], line: str, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import localize_difference

    assert localize_difference.main([COMPARE, *words, "--out", str(tmp_path)]) == 2
    assert line in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        localize_difference.main(["--step", "0"])
