"""The process beside a rank that writes its checkpoints from memory that both see; no torch.

It gets a `WriterPlan` first. Then it is asked to write its own files (a folder), and on rank 0,
when all ranks have, to finish the checkpoint (a `Finish`). It answers with None, or with the
exception.
"""

import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titan_moe.checkpoint import storage
from titan_moe.checkpoint.box_sums import (
    count_bits,
    join_sums,
    sum_box,
    unlike_copies,
    unlike_replicas,
)
from titan_moe.checkpoint.digests import digests_of, write_listing
from titan_moe.checkpoint.raw_files import Bytes, write_file
from titan_moe.runtime.child_process import receive, send
from titan_moe.runtime.errors import RunError


class StagedPart(NamedTuple):
    """A rank's part of a tensor, in the shared memory."""

    tensor: int
    """The tensor's number among `FinishPlan.shapes`."""
    start: int
    itemsize: int
    lengths: tuple[int, ...]
    origin: tuple[int, ...]
    shape: tuple[int, ...]


class FilePart(NamedTuple):
    """Part of a tensor file: bytes of the shared memory between those of torch.save."""

    before: bytes
    start: int
    nbytes: int
    after: bytes


class FinishPlan(NamedTuple):
    """What rank 0 needs to finish a checkpoint, the same for each of a layout."""

    metadata: bytes
    shapes: dict[str, tuple[int, ...]]
    """Of all ranks' tensors, in the order of their names."""
    held: list[dict[int, tuple[int, str]]]
    """Of each rank, how many elements of each tensor it has and which, by the tensor's number."""
    copies: list[list[str]]
    """Tensors that should be the same."""


class WriterPlan(NamedTuple):
    """What a rank's writer has to know of a layout."""

    rank: int
    memory: int
    """Handle of the shared memory."""
    size: int
    parts: list[StagedPart]
    files: dict[str, list[FilePart]]
    finish: FinishPlan | None
    """On rank 0."""


class Finish(NamedTuple):
    """A checkpoint whose tensor files are on disk."""

    aside: Path
    target: Path
    manifest: dict[str, Any]
    """Without checksums."""
    train_state: dict[str, Any]
    step: int
    keep_latest_k: int


def serve(pipe: Connection) -> None:
    """Answer the rank's requests."""
    os.nice(5)  # Where cores are few, training goes first.
    plan: WriterPlan = receive(pipe)
    with suppress(OSError):  # Memory is found now, not while a step waits for its copy.
        os.posix_fallocate(plan.memory, 0, plan.size)
    memory = memory_of(plan)
    while True:
        request: Path | Finish = receive(pipe)
        answer = None
        try:
            if isinstance(request, Finish):
                assert plan.finish is not None
                finish(plan.finish, request)
            else:
                write_own(plan, memory, request)
        except Exception as error:  # The rank makes one line of it.
            answer = error
        send(pipe, answer)


def memory_of(plan: WriterPlan) -> memoryview:
    """What the rank copies into."""
    return memoryview(mmap.mmap(plan.memory, plan.size, prot=mmap.PROT_READ))


def write_own(plan: WriterPlan, memory: memoryview, folder: Path) -> None:
    """Write a rank's files, and its report: sums of its parts and digests of its files."""
    for name, parts in plan.files.items():
        write_file(folder / name, _contents(parts, memory))
    sums: dict[int, int] = {}
    for part in plan.parts:
        box = np.ndarray(part.lengths, f"i{part.itemsize}", memory, part.start)
        sums[part.tensor] = sum_box(box, part.origin, part.shape)
    report = {"sums": list(sums.items()), "digests": digests_of(folder, plan.files)}
    write_file(_report(folder, plan.rank), [json.dumps(report).encode()])


def _contents(parts: Sequence[FilePart], memory: memoryview) -> Iterator[Bytes]:
    for part in parts:
        yield from (part.before, memory[part.start : part.start + part.nbytes], part.after)


def _report(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def finish(plan: FinishPlan, what: Finish) -> None:
    """Describe what all ranks have written, and give it its name. Raises RunError where replicas
    differ, and OSError."""
    reports = [_read_report(what.aside, rank) for rank in range(len(plan.held))]
    sums = np.zeros((len(reports), len(plan.shapes)), dtype=np.int64)
    held = np.zeros_like(sums)
    for rank, report in enumerate(reports):
        for tensor, total in report["sums"]:
            sums[rank, tensor] = total
        for tensor, (number, _) in plan.held[rank].items():
            held[rank, tensor] = number
    checksums, unlike = join_sums(count_bits(sums), held.sum(axis=0), plan.shapes)
    if unlike:
        names = list(plan.shapes)
        everyone = [
            {(names[row], box): int(sums[rank, row]) for row, (_, box) in own.items()}
            for rank, own in enumerate(plan.held)
        ]
        raise unlike_replicas(unlike, everyone)
    if problems := unlike_copies(plan.copies, checksums):
        raise RunError("; ".join(problems))
    write_file(what.aside / storage.METADATA, [plan.metadata])
    storage.write_json(what.aside / storage.TRAIN_STATE, what.train_state)
    storage.write_json(what.aside / storage.MANIFEST, what.manifest | {"checksums": checksums})
    digests: Mapping[str, str] = {k: v for each in reports for k, v in each["digests"].items()}
    for name in digests:
        if not (what.aside / name).is_file():
            raise _not_shared(what.aside, name)
    write_listing(what.aside, digests)
    storage.commit(what.aside, what.target)
    storage.keep_latest(what.target.parent, count=what.keep_latest_k, newest=what.step)


def _read_report(folder: Path, rank: int) -> dict[str, Any]:
    path = _report(folder, rank)
    try:
        report = json.loads(path.read_text())
    except FileNotFoundError:
        raise _not_shared(folder, path.name) from None
    path.unlink()
    return report


def _not_shared(folder: Path, name: str) -> RunError:
    return RunError(
        f"checkpoint {folder} is incomplete: {name} is missing: it was removed, or job.dump_folder "
        "is not one folder for all nodes"
    )
