"""The small run that trials disturb, and what it must be in the end: the undisturbed one."""

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.jobs import TINY, Job, train
from titan_moe.checkpoint.digests import damaged_files, read_digests
from titan_moe.checkpoint.folder import saved_steps, step_folder
from titan_moe.checkpoint.manifest import MANIFEST
from titan_moe.metrics.jsonl import read_json_lines

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "1 rank": (1, {}),
    "dp_shard=2": (2, {}),
    "dp_replicate=2": (2, {"data_parallel_replicate_degree": 2}),
    "ep=2": (2, {"expert_parallel_degree": 2}),
    "tp=2": (2, {"tensor_parallel_degree": 2, "expert_tensor_parallel_degree": 2}),
    "pp=2": (2, {"pipeline_parallel_degree": 2}),
    "pp=2 ep=2": (4, {"pipeline_parallel_degree": 2, "expert_parallel_degree": 2}),
}
"""The number of ranks, and keys of [parallelism]."""
MODES = ("disabled", "async", "async_with_pinned_mem")
STEPS, INTERVAL = 8, 2
_SAVED = range(INTERVAL, STEPS + 1, INTERVAL)
_KEYS: dict[str, object] = TINY | {
    "training.steps": STEPS,
    "lr_scheduler.warmup_steps": 2,
    "checkpoint.enable": True,
    "checkpoint.interval": INTERVAL,
}
_FIGURES = ("step", "loss", "grad_norm", "lr", "tokens")


class Run(NamedTuple):
    """The layout of a trial's run, and its checkpoint.async_mode."""

    layout: str
    mode: str

    def start(self, folder: Path, work: Path, *, keep: int = 2) -> Job:
        """Starts it in `folder`, for the first time or to go on; `work` is for the job's output.

        It keeps its last `keep` checkpoints; 0: all.
        """
        ranks, degrees = LAYOUTS[self.layout]
        keys = _KEYS | {f"parallelism.{name}": value for name, value in degrees.items()}
        keys |= {"checkpoint.async_mode": self.mode, "checkpoint.keep_latest_k": keep}
        return train(work, ranks, keys | {"job.dump_folder": folder})


def draw_run(random_: random.Random) -> Run:
    return Run(random_.choice(list(LAYOUTS)), random_.choice(MODES))


class Whole(NamedTuple):
    """An undisturbed run of a layout."""

    seconds: float
    """The time from its start to its end."""
    figures: list[list[Any]]
    checkpoints: dict[int, dict[str, Any]]
    """By step."""
    size: int
    """Bytes of a checkpoint."""

    def half_written(self, folder: Path) -> str:
        """What is wrong with the checkpoints of a run in `folder`; empty if nothing is."""
        for step in saved_steps(folder / "checkpoint"):
            try:
                found = contents(step_folder(folder / "checkpoint", step))
            except (OSError, ValueError) as error:
                return f"step-{step} counts as a checkpoint: {error}"
            if found != self.checkpoints.get(step):
                return f"step-{step} is another run's"
        return ""

    def unlike(self, folder: Path) -> str:
        """How a run in `folder`, which has ended, is another one; empty if it is not."""
        if figures(folder) != self.figures:
            return f"other figures: {figures(folder)}, not {self.figures}"
        if STEPS not in saved_steps(folder / "checkpoint"):
            return "no last checkpoint"
        return self.half_written(folder)


class Undisturbed:
    """Undisturbed runs, each made when it is asked for.

    They are made in the folder `work`, and each may take `seconds`.
    """

    def __init__(self, work: Path, seconds: float) -> None:
        self._work = work
        self._seconds = seconds
        self._made: dict[str, Whole] = {}

    def of(self, run: Run) -> Whole:
        """Returns that of the run's layout. Raises SystemExit if it fails."""
        if run.layout not in self._made:
            self._made[run.layout] = self._make(Run(run.layout, "disabled"))
        return self._made[run.layout]

    def _make(self, run: Run) -> Whole:
        work = self._work / run.layout
        folder, began = work / "run", time.monotonic()
        work.mkdir(parents=True)
        job = run.start(folder, work, keep=0)
        if (code := job.wait(self._seconds)) != 0:
            raise SystemExit(f"cannot prepare: {run}: exit code {code}\n{job.words()}")
        seconds = time.monotonic() - began
        folders = {step: step_folder(folder / "checkpoint", step) for step in _SAVED}
        checkpoints = {step: contents(path) for step, path in folders.items()}
        size = sum(path.stat().st_size for path in folders[STEPS].iterdir())
        whole = Whole(seconds, figures(folder), checkpoints, size)
        shutil.rmtree(work)
        return whole


def figures(folder: Path) -> list[list[Any]]:
    """Of each step, in the order in which they stand in metrics.jsonl."""
    return [[line[key] for key in _FIGURES] for line in read_json_lines(folder / "metrics.jsonl")]


def contents(checkpoint: Path) -> dict[str, Any]:
    """A digest of each file, and the manifest but for what names the run's folder and the state of
    the checkout. Raises ValueError where SHA256SUMS does not agree with all files, and OSError."""
    digests = read_digests(checkpoint)
    if digests is None:
        raise ValueError(f"{checkpoint} has no SHA256SUMS")
    if damaged := damaged_files(checkpoint, digests):
        raise ValueError("; ".join(damaged))
    manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    del manifest["job"], manifest["code"]
    return digests | {MANIFEST: manifest}
