"""The small run that trials disturb, the undisturbed one, and how a trial ends."""

import json
import os
import random
import re
import shutil
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.commands import TITAN_MOE
from tests.support.jobs import TINY, Job
from tests.support.paths import REPO
from titan_moe.cli.audit import audit
from titan_moe.config.errors import ConfigError
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.runtime.files import saved_steps, step_folder

_LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "1 rank": (1, {}),
    "dp_shard=2": (2, {}),
    "dp_replicate=2": (2, {"data_parallel_replicate_degree": 2}),
    "ep=2": (2, {"expert_parallel_degree": 2}),
    "tp=2": (2, {"tensor_parallel_degree": 2, "expert_tensor_parallel_degree": 2}),
    "pp=2": (2, {"pipeline_parallel_degree": 2}),
    "pp=2 ep=2": (4, {"pipeline_parallel_degree": 2, "expert_parallel_degree": 2}),
}
"""The number of ranks, and keys of [parallelism]."""
_MODES = ("disabled", "async", "async_with_pinned_mem")
STEPS, INTERVAL = 8, 2
_KEYS: dict[str, object] = {
    **TINY,
    "training.global_batch_size": 4,
    "training.steps": STEPS,
    "lr_scheduler.warmup_steps": 2,
    "checkpoint.enable": True,
    "checkpoint.interval": INTERVAL,
}
_FIGURES = ("step", "loss", "grad_norm", "lr", "tokens")
_LONGEST = 1500
# The name of a Python exception tells a user nothing.
_RAW = re.compile(r"Traceback|\b[A-Z]\w*(Error|Exception)\b|<class '|object at 0x")


class Outcome(NamedTuple):
    """The end of a trial."""

    kind: str
    """read: the run took what it was given; refused: it said in clear lines why not; resumed: it
    went on and became the undisturbed run; missed: it ended before anything befell it; failed."""
    said: str


def refused(lines: Sequence[str]) -> Outcome:
    """Judges the lines that a user got instead of a run."""
    for line in lines:
        if not line or len(line) > _LONGEST or _RAW.search(line):
            return Outcome("failed", f"unclear: {line[:_LONGEST]!r}")
    return Outcome("refused", "; ".join(lines)) if lines else Outcome("failed", "without a word")


def titan_moe(folder: Path, *words: object) -> Job:
    """Starts a command on the CPU; its output is in `folder`."""
    variables = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": f"{REPO}:{os.environ.get('PYTHONPATH', '')}",
    }
    return Job(folder, [*TITAN_MOE, *words], variables)


def train(folder: Path, ranks: int, keys: dict[str, object]) -> Job:
    """Starts a training."""
    return titan_moe(folder, "train", "--ranks", ranks, *(f"--{k}={v}" for k, v in keys.items()))


class Run(NamedTuple):
    """The layout of a trial's run, and its checkpoint.async_mode."""

    layout: str
    mode: str

    def start(self, folder: Path, work: Path, *, keep: int = 2) -> Job:
        """Starts it in `folder`, for the first time or to go on; `work` is for the job's output.

        It keeps its last `keep` checkpoints; 0: all.
        """
        ranks, degrees = _LAYOUTS[self.layout]
        keys = _KEYS | {f"parallelism.{name}": value for name, value in degrees.items()}
        keys |= {"checkpoint.async_mode": self.mode, "checkpoint.keep_latest_k": keep}
        return train(work, ranks, keys | {"job.dump_folder": folder})


def draw_run(random_: random.Random) -> Run:
    return Run(random_.choice(list(_LAYOUTS)), random_.choice(_MODES))


class Whole(NamedTuple):
    """An undisturbed run of a layout."""

    seconds: float
    """The time from its start to its end."""
    figures: list[list[Any]]
    checkpoints: dict[int, dict[str, Any]]
    """Each checkpoint's manifest, by step."""
    size: int
    """Bytes of a checkpoint."""

    def half_written(self, folder: Path) -> str:
        """Returns what is wrong with the checkpoints of a run in `folder`; empty if nothing is."""
        for step in saved_steps(folder / "checkpoint"):
            try:
                found = _contents(step_folder(folder / "checkpoint", step))
            except (OSError, ValueError, ConfigError) as error:
                return f"step-{step} counts as a checkpoint: {error}"
            if found != self.checkpoints.get(step):
                return f"step-{step} is another run's"
        return ""

    def unlike(self, folder: Path) -> str:
        """Returns how a run in `folder`, which has ended, differs; empty if it does not."""
        if _figures(folder) != self.figures:
            return f"other figures: {_figures(folder)}, not {self.figures}"
        if STEPS not in saved_steps(folder / "checkpoint"):
            return "no last checkpoint"
        return self.half_written(folder)


@cache
def undisturbed(layout: str, work: Path, seconds: float) -> Whole:
    """Makes a layout's run in the folder `work`. Raises SystemExit if it fails or takes longer."""
    work = work / layout
    folder, began = work / "run", time.monotonic()
    end(Run(layout, "disabled").start(folder, work, keep=0), seconds)
    took = time.monotonic() - began
    saved = {
        step: step_folder(folder / "checkpoint", step)
        for step in range(INTERVAL, STEPS + 1, INTERVAL)
    }
    checkpoints = {step: _contents(path) for step, path in saved.items()}
    size = sum(path.stat().st_size for path in saved[STEPS].iterdir())
    whole = Whole(took, _figures(folder), checkpoints, size)
    shutil.rmtree(work)
    return whole


def end(job: Job, seconds: float) -> None:
    """Waits for what a trial needs. Raises SystemExit if it fails."""
    if (code := job.wait(seconds)) != 0:
        raise SystemExit(f"cannot prepare: exit code {code}\n{job.output()}")


def _figures(folder: Path) -> list[list[Any]]:
    """Figures of each step, in the order of metrics.jsonl."""
    return [[line[key] for key in _FIGURES] for line in read_json_lines(folder / "metrics.jsonl")]


def _contents(checkpoint: Path) -> dict[str, Any]:
    """The manifest, which has digests and checksums, without the run's folder and the checkout's
    state.

    Raises OSError, ValueError where the checkpoint is not what its manifest says, and ConfigError
    where the folder has neither a manifest nor tensors.
    """
    if problems := audit(checkpoint)["damaged"]:
        raise ValueError("; ".join(problems))
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    for key in ("job", "code", "sha256"):
        del manifest[key]
    return manifest
