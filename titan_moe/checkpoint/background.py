"""Saves that a step waits for only while its tensors are copied: checkpoint.async_mode.

Every rank copies into memory that it shares with a process of its own (writer.py), which writes the
files. Ranks hear of one another at the steps that follow: when all have written, rank 0's process
finishes the checkpoint. No thread of a rank takes part in a save, and no collective but those that
all ranks make between two steps.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint import storage
from titan_moe.checkpoint.manifest import gather_specs
from titan_moe.checkpoint.shared_memory import SharedMemory
from titan_moe.checkpoint.tensor_files import (
    Chunk,
    FileLayout,
    frame_of,
    gather_chunks,
    held_chunks,
    metadata_of,
    share_out,
)
from titan_moe.checkpoint.writer import FilePart, Finish, FinishPlan, StagedPart, WriterPlan
from titan_moe.config.job_config import Checkpoint
from titan_moe.distributed.agreement import lowest, on_every_rank
from titan_moe.distributed.boxes import sizes
from titan_moe.distributed.dtensor import local_part
from titan_moe.runtime.child_process import ChildProcess
from titan_moe.runtime.errors import RunError

logger = logging.getLogger(__name__)

_ALIGNMENT = 64  # Bytes; of a cache line.
_FAILED, _BUSY, _DONE = -1, 0, 1


class BackgroundSaves:
    """Writes checkpoints of tensors that lie as they do now. Every method but `close` is
    collective.

    Args:
        tensors: of this rank; those of later saves have the same names, places and types.
        copies: names of tensors that should be the same.
        config: the [checkpoint] table.
    """

    writer_process: type[ChildProcess] = ChildProcess
    """What runs the writer; a simulation has another."""

    def __init__(
        self, tensors: Mapping[str, Tensor], copies: list[list[str]], config: Checkpoint
    ) -> None:
        self.specs = gather_specs(tensors)
        """Of all ranks' tensors."""
        chunks = held_chunks(tensors)
        everyone = gather_chunks(chunks)
        ends = list(accumulate(_aligned(chunk.nbytes) for chunk in chunks))
        starts = dict(zip((chunk.name for chunk in chunks), [0, *ends], strict=False))
        pinned = config.async_mode == "async_with_pinned_mem" and torch.cuda.is_available()
        self._memory = SharedMemory(ends[-1] if ends else 0, pinned=pinned)
        self._staged = {
            chunk.name: self._memory.view(starts[chunk.name], sizes(chunk.box), chunk.dtype)
            for chunk in chunks
        }
        self._child = self.writer_process(
            "titan_moe.checkpoint.writer:serve", handles=(self._memory.handle,)
        )
        self._longest_wait = config.save_timeout_seconds
        self._save: Finish | None = None
        self._began = self._ended = time.perf_counter()
        self._finishing = False
        self._state = _DONE
        self._error: Exception | None = None
        self._ask(
            WriterPlan(
                rank=dist.get_rank(),
                memory=self._memory.handle,
                size=self._memory.size,
                parts=_parts(chunks, starts, sorted(self.specs)),
                files=_files(share_out(everyone)[dist.get_rank()], starts),
                finish=_finish_plan(everyone, copies) if dist.get_rank() == 0 else None,
            )
        )

    @property
    def busy(self) -> bool:
        """Whether a save is under way; alike on all ranks."""
        return self._save is not None

    @property
    def seconds(self) -> float:
        """What the save under way has taken so far, or the last one until it was seen to have
        ended, which a step sees at its end."""
        return (time.perf_counter() if self.busy else self._ended) - self._began

    def begin(self, tensors: Mapping[str, Tensor], save: Finish) -> None:
        """Copy the tensors and let them be written. None may be under way."""
        assert not self.busy and tensors.keys() >= self._staged.keys()
        self._began = time.perf_counter()
        for name, staged in self._staged.items():
            local = local_part(tensors[name]).detach()
            assert local.shape == staged.shape, f"{name} lies otherwise than at the first save"
            staged.copy_(local, non_blocking=True)
        if any(local_part(tensor).is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()
        self._save, self._finishing = save, False
        self._ask(save.aside)

    def poll(self, seconds: float = 0.0) -> int | None:
        """The step of the save that has just ended, if one has; waits so long for this rank's
        process.

        Raises RunError on all ranks when it has failed. Nothing of it is left then.
        """
        if self._save is None:
            return None
        self._hear(seconds)
        state = lowest(self._state)
        if state == _FAILED:
            self._fail(self._save)
        if state == _BUSY:
            return None
        if not self._finishing:
            self._finishing = True
            if dist.get_rank() == 0:
                self._ask(self._save)
            return None
        step, target = self._save.step, self._save.target
        self._save, self._ended = None, time.perf_counter()
        if dist.get_rank() == 0:
            logger.info("saved %s in the background in %.1f s", target, self.seconds)
        return step

    def wait(self) -> int | None:
        """As `poll`, once the save under way has ended."""
        step, deadline = None, time.monotonic() + self._longest_wait
        while self.busy:
            step = self.poll(0.1)
            if self.busy and time.monotonic() > deadline:
                limit = f"checkpoint.save_timeout_seconds={self._longest_wait}"
                late = f"it is not on disk after {limit}: raise it if the disk is only slow"
                self._state, self._error = _FAILED, RunError(f"{self._doing()}: {late}")
        return step

    def close(self) -> None:
        """End the process and what it is at, and give the memory back."""
        self._child.close()
        self._staged.clear()
        self._memory.close()

    def _doing(self) -> str:
        return f"cannot save checkpoint {self._save.target if self._save else ''}"

    def _ask(self, request: WriterPlan | Path | Finish) -> None:
        """A plan is not answered."""
        with suppress(ConnectionError):  # When it is gone, `_hear` says how.
            self._child.send(request)
        if not isinstance(request, WriterPlan):
            self._state = _BUSY

    def _hear(self, seconds: float) -> None:
        if self._state != _BUSY or not self._child.answered(seconds):
            return
        try:
            self._error = self._child.receive()
        except (EOFError, ConnectionError):
            end = f"the process that writes it {self._child.last_words()}"
            self._error = RunError(f"{self._doing()}: {end}")
        self._state = _DONE if self._error is None else _FAILED

    def _fail(self, save: Finish) -> NoReturn:
        def say() -> None:
            if self._error is not None:
                raise self._error

        doing, self._save = self._doing(), None
        self._child.close()  # Before any rank removes what it writes.
        try:
            on_every_rank(say, doing=doing)
        finally:
            if dist.get_rank() == 0:
                storage.abandon(save.aside)
        raise AssertionError("no rank says why")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _parts(
    chunks: Sequence[Chunk], starts: Mapping[str, int], names: Sequence[str]
) -> list[StagedPart]:
    rows = {name: row for row, name in enumerate(names)}
    return [
        StagedPart(
            tensor=rows[chunk.name],
            start=starts[chunk.name],
            itemsize=chunk.dtype.itemsize,
            lengths=sizes(chunk.box),
            origin=tuple(part.start for part in chunk.box),
            shape=chunk.shape,
        )
        for chunk in chunks
    ]


def _files(written: Sequence[Chunk], starts: Mapping[str, int]) -> dict[str, list[FilePart]]:
    """What is in each of this rank's files."""
    layout, files = FileLayout(dist.get_rank()), defaultdict(list)
    for chunk in written:
        before, after = frame_of(chunk)
        part = FilePart(before, starts[chunk.name], chunk.nbytes, after)
        files[layout.place(chunk).relative_path].append(part)
    return dict(files)


def _finish_plan(everyone: Sequence[Sequence[Chunk]], copies: list[list[str]]) -> FinishPlan:
    shapes = {chunk.name: chunk.shape for held in everyone for chunk in held}
    rows = {name: row for row, name in enumerate(sorted(shapes))}
    return FinishPlan(
        metadata=metadata_of(share_out(everyone)),
        shapes={name: shapes[name] for name in rows},
        held=[
            {rows[each.name]: (prod(sizes(each.box)), str(each.box)) for each in held}
            for held in everyone
        ],
        copies=copies,
    )
