"""Damaged checkpoints, exports, tokenised data and routing records, each read by a training run."""

import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.damage import MARKER, copy_linked, damage
from tests.fuzz.runs import Outcome, end, refused, titan_moe, train
from tests.support.documents import random_texts, write_jsonl
from tests.support.jobs import TINY, Job
from titan_moe.metrics.jsonl import read_json_lines

_STEPS = 4
_TRAINING: dict[str, object] = {
    **TINY,
    "training.global_batch_size": 4,
    "training.steps": _STEPS,
    "lr_scheduler.total_steps": 10,
    "checkpoint.interval": 2,
}


class Subject(NamedTuple):
    """A kind of folder, and the run that reads one."""

    make: Callable[[Path], Job]
    """Writes an undamaged one into a folder."""
    keys: Callable[[Path], dict[str, object]]
    """Keys of the run that reads it; the run's own folder is the one above it."""
    digested: bool
    """If digests and checksums cover all that is read: a run must equal the undamaged one's."""


def _checkpoints(folder: Path) -> Job:
    """Saves on two ranks, so that a file may hold what the other rank's should."""
    keys = {"job.dump_folder": folder.parent, "checkpoint.folder": folder.name}
    return train(folder.parents[1], 2, _TRAINING | keys | {"checkpoint.enable": True})


def _export(folder: Path) -> Job:
    made = folder.parents[1] / "made"
    end(_checkpoints(made / "checkpoint"), 300)
    return titan_moe(made, "hf", "export", made / f"checkpoint/step-{_STEPS}", "--out", folder)


def _routing(folder: Path) -> Job:
    made = folder.parents[1] / "made"
    return train(made, 1, _TRAINING | {"job.dump_folder": made, "debug.routing_record": folder})


def _tokens(folder: Path) -> Job:
    made = folder.parents[1] / "made"
    documents = write_jsonl(made / "documents.jsonl", random_texts(120, longest=2000))
    data = ("--training.dataset", "json", "--training.dataset_path", documents)
    return titan_moe(made, "tokenize", "--out", folder, *data)


SUBJECTS = {
    "checkpoint": Subject(
        _checkpoints,
        lambda folder: {
            "checkpoint.enable": True,
            "checkpoint.folder": folder.name,
            "training.steps": _STEPS + 1,
        },
        digested=True,
    ),
    "export": Subject(
        _export,
        lambda folder: {
            "checkpoint.enable": True,
            "checkpoint.initial_load_path": folder,
            "checkpoint.initial_load_in_hf": True,
            "training.steps": 1,
        },
        digested=True,
    ),
    "routing": Subject(_routing, lambda folder: {"debug.routing_replay": folder}, digested=False),
    "tokens": Subject(
        _tokens,
        lambda folder: {"training.dataset": "tokens", "training.dataset_path": folder},
        digested=False,
    ),
}


def trial(
    work: Path, seconds: float, name: str, own: Path, random_: random.Random
) -> tuple[str, Outcome]:
    """Damages a folder once; the run that reads it may take `seconds`."""
    whole, figures = _undamaged(name, work, seconds)
    copy_linked(whole, own / "case")
    folder = own / "case" / "data"
    what = damage(folder, random_)
    outcome = _read(name, folder, seconds)
    if outcome.kind == "read" and SUBJECTS[name].digested and outcome.said != figures:
        return what, Outcome("failed", f"went on as another run: {outcome.said}")
    return what, outcome


@cache
def _undamaged(name: str, work: Path, seconds: float) -> tuple[Path, str]:
    """Makes an undamaged folder in a run's folder, and the figures of the run that reads it.

    Raises SystemExit if a run refuses it.
    """
    whole, case = work / name / "run", work / name / "case"
    whole.mkdir(parents=True)
    end(SUBJECTS[name].make(whole / "data"), 300)
    copy_linked(whole, case)
    outcome = _read(name, case / "data", seconds)
    if outcome.kind != "read":
        raise SystemExit(f"{name}: undamaged: {outcome.said}")
    shutil.rmtree(case)
    return whole, outcome.said


def _read(name: str, folder: Path, seconds: float) -> Outcome:
    """Trains with the folder of a case."""
    case, before = folder.parent, _listing(folder)
    keys = _TRAINING | {"job.dump_folder": case} | SUBJECTS[name].keys(folder)
    job = train(case.with_name("job"), 1, keys)
    code = job.wait(seconds)
    if (case / MARKER).exists():
        return Outcome("failed", "a program in the data was run")
    if code == 0:
        last = read_json_lines(case / "metrics.jsonl")[-1]
        return Outcome("read", str([last[key] for key in ("step", "loss", "grad_norm")]))
    if code not in (1, 2):
        return Outcome("failed", f"exit code {code}: {job.output()}")
    if _listing(folder) != before:
        return Outcome("failed", f"changed the folder: {job.output()}")
    return refused(job.error_lines())


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    found = [(path, path.lstat()) for path in sorted(folder.rglob("*"))]
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found]
