"""Files in configs/ for GPUs have layouts that `titan-moe plan` would choose, or say why not."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import REPO
from titan_moe.config.job_config import DEGREES
from titan_moe.config.parse import load_job
from titan_moe.models.hf import model_of_job
from titan_moe.planner.load import BALANCED
from titan_moe.planner.search import Question, fastest, search
from titan_moe.planner.step_time import step_time
from titan_moe.runtime.gpus import GPUS

_FILES = {path.relative_to(REPO): path.read_text() for path in REPO.glob("configs/*/*_*gpu.toml")}
_LINE = re.compile(r"^# plan: ((?: ?\w+=\d+)+), (\d+\.\d) times as fast: \w.*\.$", re.MULTILINE)
"""Degrees that plan would choose, how much faster they are expected to be, and a reason."""
_NEAR = 0.95
"""Share of the speed of plan's choice that a file without a line must have."""


def problem(path: Path, text: str) -> str:
    """Returns what is wrong with a file's layout, "" if nothing is."""
    ranks = int(path.stem.rpartition("_")[2].removesuffix("gpu"))
    job, said = load_job(["--config", str(path)]), _LINE.search(text)
    model, gpu = model_of_job(job.model), GPUS["H100"]
    plan = Question(job, model, ranks, gpu, BALANCED).plan({})
    assert plan is not None
    own = sum(step_time(plan, gpu, BALANCED).values())
    free = dict.fromkeys(DEGREES.values(), 1) | {DEGREES["dp_shard"]: -1}
    question = Question(job.with_values(parallelism=free), model, ranks, gpu, BALANCED)
    if said is None:
        found = search(question, keep=1, worst=_NEAR * own).layouts
        return "".join(f"{each.degrees}: {own / each.step_seconds:.2f} times" for each in found)
    degrees: dict[str, Any] = dict.fromkeys(DEGREES, 1)
    degrees |= {axis: int(size) for axis, size in (each.split("=") for each in said[1].split())}
    layout, _ = fastest(question, degrees)
    times = own / layout.step_seconds if layout else 0.0
    right = abs(times - float(said[2])) < 0.15 and times > 1 / _NEAR
    return "" if right else f"{said[1]} is expected to be {times:.2f} times as fast"


def tier(path: Path) -> pytest.MarkDecorator:
    """A search of 64 GPUs takes up to a minute; the line of a file is checked in a second."""
    is_long = "# plan:" not in _FILES[path] and path.stem.endswith(("64gpu", "1024gpu"))
    return pytest.mark.full if is_long else pytest.mark.slow


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=tier(path), id=str(path)) for path in sorted(_FILES)]
)
def test_a_file_for_gpus_has_a_layout_of_plan_or_says_why_not(path: Path) -> None:
    assert problem(REPO / path, _FILES[path]) == ""


@pytest.mark.slow
def test_slow_layouts_and_lines_that_are_wrong_are_found(tmp_path: Path) -> None:
    path = Path("configs/qwen3/8B_8gpu.toml")  # It has plan's layout, and so no line.
    slow = re.sub(r"local_batch_size = \d+", "local_batch_size = 8", _FILES[path])
    slow += "\n[parallelism]\npipeline_parallel_degree = 8\n"
    for text, says in (
        (slow, " times"),
        ("# plan: dp_shard=8, 9.9 times as fast: no reason.\n" + slow, "is expected to be"),
        ("# plan: dp_shard=8, 1.0 times as fast: needless.\n" + _FILES[path], "is expected to be"),
    ):
        copy = tmp_path / path.name
        copy.write_text(text)
        assert says in problem(copy, text)
    assert problem(REPO / path, _FILES[path]) == ""
