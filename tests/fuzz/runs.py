"""The small run that trials disturb, and what it must be in the end: the undisturbed one."""

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.jobs import TINY, Job
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
    """How a trial's run is laid out, saved and started."""

    layout: str
    mode: str
    by_command: bool

    def __str__(self) -> str:
        started = "run_train.sh" if self.by_command else "forked"
        return f"{self.layout}, {self.mode}, {started}"

    def start(self, folder: Path, work: Path, output: Path | None = None, *, keep: int = 2) -> Job:
        """Start it in `folder`, for the first time or to go on.

        Args:
            work: a folder for the job's own files.
            output: what it prints goes here; left out: into `work`.
            keep: how many checkpoints; 0: all.
        """
        ranks, degrees = LAYOUTS[self.layout]
        keys = _KEYS | {f"parallelism.{name}": value for name, value in degrees.items()}
        keys |= {"checkpoint.async_mode": self.mode, "checkpoint.keep_latest_k": keep}
        keys |= {"job.dump_folder": folder}
        arguments = [f"--{key}={value}" for key, value in keys.items()]
        output = output or work / "output"
        return Job(arguments, ranks, work, output, by_command=self.by_command)


def draw_run(random_: random.Random, *, commanded: float) -> Run:
    """`commanded`: the share of runs that are started by run_train.sh."""
    by_command = random_.random() < commanded
    return Run(random_.choice(list(LAYOUTS)), random_.choice(MODES), by_command)


class Whole(NamedTuple):
    """An undisturbed run of a layout."""

    seconds: dict[bool, float]
    """From its start to its end, by whether run_train.sh started it."""
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
    """Undisturbed runs, each made when it is asked for."""

    def __init__(self, work: Path, seconds: float) -> None:
        """`work`: a folder to make them in; `seconds`: of a run."""
        self._work = work
        self._seconds = seconds
        self._made: dict[str, Whole] = {}

    def of(self, run: Run) -> Whole:
        """That of the run's layout. Raises SystemExit where it fails, or where run_train.sh and
        forked ranks make two of them."""
        known = self._made.get(run.layout)
        if known is None or run.by_command not in known.seconds:
            made = self._make(run)
            if known is not None:
                if (made.figures, made.checkpoints) != (known.figures, known.checkpoints):
                    raise SystemExit(f"{run}: not the bits of the run that was started otherwise")
                made.seconds.update(known.seconds)
            self._made[run.layout] = made
        return self._made[run.layout]

    def _make(self, run: Run) -> Whole:
        run = run._replace(mode="disabled")
        work = self._work / str(run).replace("/", " ")
        folder, began = work / "run", time.monotonic()
        work.mkdir(parents=True)
        job = run.start(folder, work, keep=0)
        if (code := job.wait(self._seconds)) != 0:
            raise SystemExit(f"cannot prepare: {run}: exit code {code}\n{job.words()}")
        seconds = {run.by_command: time.monotonic() - began}
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
