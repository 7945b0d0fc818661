"""Damaged checkpoints, exports, tokenised data and routing records, each read by a training run."""

import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.damage import MARKER, copy_linked, damage
from tests.fuzz.jobs import TINY, Job, train
from tests.fuzz.verdict import Outcome, refused
from tests.support.documents import random_texts, write_jsonl
from titan_moe.metrics.jsonl import read_json_lines

_STEPS = 4
_TRAINING = TINY | {
    "training.steps": _STEPS,
    "lr_scheduler.total_steps": 10,
    "lr_scheduler.warmup_steps": 1,
    "checkpoint.interval": 2,
}


class Subject(NamedTuple):
    """A kind of folder, and the run that reads one."""

    make: Callable[[Path], Job]
    """Writes an undamaged one into a folder."""
    keys: Callable[[Path], dict[str, object]]
    """Keys of the run that reads it; the run's own folder is the one above it."""
    digested: bool
    """Whether its every byte is under a digest: a run that takes it must be the undamaged one's."""


def _checkpoints(folder: Path) -> Job:
    """Saves on two ranks, so that a file may hold what the other rank's should."""
    keys = {"job.dump_folder": folder.parent, "checkpoint.folder": folder.name}
    return train(folder.parents[1], 2, _TRAINING | keys | {"checkpoint.enable": True})


def _export(folder: Path) -> Job:
    made = folder.parents[1] / "made"
    _end(_checkpoints(made / "checkpoint"))
    return Job(made, "hf", "export", made / f"checkpoint/step-{_STEPS}", "--out", folder)


def _routing(folder: Path) -> Job:
    made = folder.parents[1] / "made"
    return train(made, 1, _TRAINING | {"job.dump_folder": made, "debug.routing_record": folder})


def _tokens(folder: Path) -> Job:
    made = folder.parents[1] / "made"
    documents = write_jsonl(made / "documents.jsonl", random_texts(120, longest=2000))
    data = ("--training.dataset", "json", "--training.dataset_path", documents)
    return Job(made, "tokenize", "--out", folder, *data)


def _end(job: Job) -> None:
    """Raises SystemExit if an undamaged folder cannot be made."""
    if code := job.wait(300):
        sys.exit(f"cannot prepare: {code}: {job.words()}")


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


class Folders:
    """Undamaged folders, made once in `work`; a run that reads one may take `seconds`."""

    def __init__(self, work: Path, seconds: float) -> None:
        self._work = work
        self._seconds = seconds
        self._figures: dict[str, str] = {}

    def trial(self, name: str, own: Path, random_: random.Random) -> tuple[str, Outcome]:
        """Damages a folder once. Raises SystemExit if the run refuses the undamaged folder."""
        if name not in self._figures:
            _, whole = self._run(name, own / "whole", lambda folder: "nothing")
            if whole.kind != "read":
                sys.exit(f"{name}: undamaged: {whole.said}")
            self._figures[name] = whole.said
        done, outcome = self._run(name, own / "case", lambda folder: damage(folder, random_))
        same = outcome.kind != "read" or outcome.said == self._figures[name]
        if SUBJECTS[name].digested and not same:
            return done, Outcome("failed", f"went on as another run: {outcome.said}")
        return done, outcome

    def _run(self, name: str, case: Path, change: Callable[[Path], str]) -> tuple[str, Outcome]:
        subject = SUBJECTS[name]
        whole = self._work / name / "run" / "data"
        if not whole.exists():
            whole.parent.mkdir(parents=True)
            _end(subject.make(whole))
        shutil.rmtree(case, ignore_errors=True)
        copy_linked(whole.parent, case)
        folder = case / whole.name
        done = change(folder)
        before = _listing(folder)
        keys = _TRAINING | {"job.dump_folder": case} | subject.keys(folder)
        job = train(case.with_name("job"), 1, keys)
        code = job.wait(self._seconds)
        if (case / MARKER).exists():
            return done, Outcome("failed", "a program in the data was run")
        if code == 0:
            last = read_json_lines(case / "metrics.jsonl")[-1]
            return done, Outcome("read", str([last[key] for key in ("step", "loss", "grad_norm")]))
        if code not in (1, 2):
            return done, Outcome("failed", f"exit code {code}: {job.words()}")
        if _listing(folder) != before:
            return done, Outcome("failed", f"changed the folder: {job.words()}")
        return done, refused(job.error_lines())


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    found = [(path, path.lstat()) for path in sorted(folder.rglob("*"))]
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found]
