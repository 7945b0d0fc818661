"""The GPU benchmarks: what they say without a GPU, their arithmetic, and that they run."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.support.paths import REPO

SCRIPTS = ["gpu_moe", "gpu_permute", "gpu_slice"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", [*SCRIPTS, "gpu_all"])
def test_without_a_gpu_one_line_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module(f"scripts.bench.{name}")
    monkeypatch.setattr(sys, "argv", [name, *(["folder"] if name == "gpu_all" else [])])
    with pytest.raises(SystemExit, match=r"^no CUDA device here: --device cpu .*$"):
        module.main()


@pytest.mark.parametrize("name", ["gpu_moe", "gpu_permute"])
def test_toy_sizes_run_the_same_code(name: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "figures.json"
    module = import_module(f"scripts.bench.{name}")
    module.main(["--device", "cpu", "--repeats", "1", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert figures["toy"] and figures["rows"] and figures["goals"]
    assert "toy sizes: they mean nothing" in capsys.readouterr().out
    if name == "gpu_permute":
        assert all(row["same bits"] and row["host waits"] == 0 for row in figures["rows"])


@pytest.mark.slow
def test_toy_steps_run_the_same_code(tmp_path: Path) -> None:
    # A process of its own: it makes a world.
    file = tmp_path / "figures.json"
    options = ["--rows", "1", "--only", "deepseek_v3", "--repeats", "1"]
    command = [sys.executable, "-m", "scripts.bench.gpu_slice", "--device", "cpu", *options]
    run = subprocess.run(
        [*command, "--json", str(file)],
        cwd=REPO,
        env=_environment(),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(file.read_text())["rows"]
    assert not [row for row in rows if "failed" in row]
    assert [row["execution"] for row in rows] == ["eager", "eager", "compiled", "compiled"]
    assert all(row["tokens/s"] > 0 for row in rows)
    assert rows[0]["busiest"] < rows[1]["busiest"]  # Balanced, natural.


def _environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": ""}


def test_goals_are_met_or_missed() -> None:
    from scripts.bench.measure import Goal

    assert Goal("ratio", 1.1, 1.15, at_most=True).met
    assert not Goal("ratio", 1.2, 1.15, at_most=True).met
    assert Goal("MFU", 0.5, 0.45).met
    assert not Goal("MFU", float("nan"), 0.45).met
    assert "MISSED MFU: 0.4 >= 0.45" in str(Goal("MFU", 0.4, 0.45))


def test_a_layers_goals_name_the_published_figures() -> None:
    from scripts.bench import gpu_moe

    row = gpu_moe.Row(gpu_moe.SHAPES[2], "balanced", "backward", 1.0, 12.0, 10.0, 400.0)
    assert row.over_gemms == 1.2
    assert row.published() == {"SonicMoE": 585, "ScatterMoE": 370, "MegaBlocks": 385}
    assert [goal.met for goal in row.goals()] == [True, False, True]
    assert not gpu_moe.Row(gpu_moe.SHAPES[0], "natural", "forward", 1.0, 1.0, 1.0, 1.0).published()


def test_all_parts_exist() -> None:
    from scripts.bench import gpu_all

    parts = [command[0] for command, _ in gpu_all.PARTS.values()]
    assert all((REPO / f"scripts/bench/{part}.py").exists() for part in parts)
