"""The steps of one data rank, read in this process or in a child, and the rank's place in the data.

Python runs one thread at a time. In the process that launches a GPU's kernels, tokenizing and
packing would keep the launching thread waiting.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from titan_moe.config.errors import ConfigError, as_written
from titan_moe.config.job_config import Training
from titan_moe.config.plugins import import_modules
from titan_moe.data.order import Assignment
from titan_moe.data.packing import PackedSequence
from titan_moe.data.sequences import BlendSource, Identity, SequenceStream
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.launch import end_with_parent

Microbatches = list[list[PackedSequence]]


class StepReader:
    """Reads the microbatches of one data rank, step by step."""

    def __init__(
        self,
        streams: Sequence[SequenceStream],
        parts: Sequence[BlendSource],
        *,
        identity: Identity,
        local_batch_size: int,
    ) -> None:
        assert len(streams) % local_batch_size == 0
        self.identity = identity
        self.parts = parts
        self._streams = streams
        self._local_batch_size = local_batch_size
        # The position, by part and partition, from which on the sequences take documents: 0, until
        # a training stage changes the batch size.
        self._first = [[0] * part.order.num_partitions for part in parts]
        self._step = 0

    def read_step(self) -> tuple[Microbatches, dict[str, Any]]:
        """All microbatches of the next step, in order, and the state after it. RunError when the
        data ran out or cannot be read."""
        try:
            packed = [stream.next_sequence() for stream in self._streams]
        except RunError as error:
            raise RunError(f"step {self._step + 1}: {error}") from None
        except Exception as error:  # A disk, a network, a damaged file: each raises its own.
            reason = (str(error).splitlines() or [""])[0]
            raise RunError(
                f"step {self._step + 1}: reading the dataset {self.identity.fingerprint} failed: "
                f"{type(error).__name__}: {reason}"
            ) from error
        self._step += 1
        size = self._local_batch_size
        microbatches = [packed[first : first + size] for first in range(0, len(packed), size)]
        return microbatches, self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: this rank's sequences by number, and the places where streams are read on."""
        return {
            "identity": asdict(self.identity),
            "step": self._step,
            "first": self._first,
            "rows": {str(stream.index): stream.state() for stream in self._streams},
            "marks": [
                part.order.mark(self._oldest(number)) for number, part in enumerate(self.parts)
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the step at which `state`, merged over all ranks, was taken.

        The number of data ranks may differ from then. RunError if the state is another stream's.
        """
        _check_identity(state, self.identity)
        self._first = state["first"]
        for part, mark, first in zip(self.parts, state["marks"], self._first, strict=True):
            part.order.seek(mark, first)
        for stream in self._streams:
            stream.load_state(state["rows"][str(stream.index)], self._first)
        self._step = state["step"]

    def close(self) -> None:
        pass

    def _oldest(self, part: int) -> dict[int, int]:
        """The first position, by partition of `part`, that a resume asks for."""
        oldest: dict[int, int] = {}
        for stream in self._streams:
            for partition, position in stream.oldest(part).items():
                oldest[partition] = min(position, oldest.get(partition, position))
        return oldest


class ReaderProcess:
    """Runs a `StepReader` in a child process, with the same methods."""

    def __init__(
        self, training: Training, tokenizer_path: str, imports: Sequence[str] = (), **place: Any
    ) -> None:
        """`imports`: job.imports. `place`: keywords of `build_reader`, whose errors it raises."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._child.start()
        # Python's own end would wait for it, and it ignores the SIGTERM that it then gets.
        atexit.register(self._child.kill)
        theirs.close()
        self.identity: Identity
        self.identity, self._state = self._ask(training, tokenizer_path, imports, place)

    def read_step(self) -> tuple[Microbatches, dict[str, Any]]:
        microbatches, self._state = self._ask("read_step")
        return microbatches, self._state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = self._ask("load_state_dict", state)

    def close(self) -> None:
        """End the child at once; a `read_step` that another thread waits in raises RunError."""
        self._child.kill()
        self._child.join()

    def _ask(self, *request: Any) -> Any:
        try:
            self._pipe.send(request)
            kind, answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._child.join()
            code = self._child.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended: {code}"
            guess = " (often: out of memory)" if code == -signal.SIGKILL else ""
            raise RunError(
                f"the process that reads the data {how}{guess}: start again from the latest "
                "checkpoint"
            ) from None
        if kind is not None:
            raise kind(answer)
        return answer


def _serve(pipe: Connection) -> None:
    """Answer the rank's requests in the child, until the rank is gone."""
    # They go to all processes of a terminal or a job, and are the rank's to answer.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    from titan_moe.data.build import build_reader
    from titan_moe.data.tokenizer import load_tokenizer

    reader: StepReader | None = None
    while True:
        try:
            request = pipe.recv()
        except (EOFError, ConnectionError):
            os._exit(0)  # A library's thread that waits for a network would keep the process.
        reply: tuple[type[Exception] | None, Any]
        try:
            if reader is None:
                training, tokenizer_path, imports, place = request
                if problems := import_modules(imports):
                    raise ConfigError(problems)
                reader = build_reader(training, load_tokenizer(tokenizer_path, training), **place)
                reply = None, (reader.identity, reader.state_dict())
            elif request[0] == "read_step":
                reply = None, reader.read_step()
            else:
                reader.load_state_dict(request[1])
                reply = None, reader.state_dict()
        except ConfigError as error:
            reply = ConfigError, error.lines
        except RunError as error:
            reply = RunError, str(error)
        pipe.send(reply)


Reader = StepReader | ReaderProcess


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state of all sequences from the states of all data ranks, taken at the same step."""
    assert len({state["step"] for state in states}) == 1
    rows: dict[str, Any] = {}
    for state in states:
        rows |= state["rows"]
    marks = [_merge_marks(of_part) for of_part in zip(*(s["marks"] for s in states), strict=True)]
    ordered = dict(sorted(rows.items(), key=lambda item: int(item[0])))
    return states[0] | {"rows": ordered, "marks": marks}


def _merge_marks(marks: Sequence[Any]) -> Any:
    """Returns each partition's earliest place to read on from, which serves every sequence."""
    if marks[0] is None:
        return None
    return [
        min((place for place in places if place is not None), key=lambda p: p[0], default=None)
        for places in zip(*marks, strict=True)
    ]


def documents_without_text(state: dict[str, Any]) -> int:
    """Documents without a text that the sequences of a state have read so far."""
    return sum(row["without_text"] for row in state["rows"].values())


def continue_state(state: dict[str, Any], saved: Identity, identity: Identity) -> dict[str, Any]:
    """Convert `state`, merged over all ranks and taken under `saved`, for the loader of a training
    stage of another global_batch_size or seq_len.

    With another seq_len each sequence goes on at its cursor. With another global_batch_size new
    sequences begin, in each partition after the last document that any sequence has begun; the
    rest of those documents is left unread. RunError if the state was taken under neither.
    """
    if state["identity"] == asdict(identity):
        return state
    _check_identity(state, saved)
    moved = state | {"identity": asdict(identity)}
    size = saved.global_batch_size
    if identity.global_batch_size == size:
        return moved
    rows, first = state["rows"], state["first"]
    begins = [
        _first_unbegun(at, {b: rows[str(b)]["read"][part] for b in range(size)})
        for part, at in enumerate(first)
    ]
    zeros = [0] * len(first)
    fresh = {"read": zeros, "tokens": zeros, "part": -1, "offset": 0}
    new_rows = {str(b): fresh | {"without_text": 0} for b in range(identity.global_batch_size)}
    new_rows["0"]["without_text"] = documents_without_text(state)
    return moved | {"first": begins, "rows": new_rows}


def _first_unbegun(first: Sequence[int], read: Mapping[int, int]) -> list[int]:
    """Returns, by partition, the position after the last document that any sequence has begun.

    first: by partition, the position where the sequences began.
    read: by sequence, the documents that it has begun.
    """
    begins = list(first)
    assignment = Assignment(len(read), len(first))
    for sequence, count in read.items():
        turns = len(assignment.partitions(sequence))
        for number in range(max(0, count - turns), count):
            partition, offset = assignment.place(sequence, number)
            begins[partition] = max(begins[partition], first[partition] + offset + 1)
    return begins


_TEXT_KEYS = ("append_eos", "prepend_bos", "parse_special_tokens")


def _check_identity(state: dict[str, Any], identity: Identity) -> None:
    saved = state["identity"]
    begin = "set it as it was, or begin in another job.dump_folder"
    taken = "the checkpoint's data position was taken with "
    if saved.get("tokenizer", identity.tokenizer) != identity.tokenizer:
        path, ours = saved["tokenizer_path"], identity.tokenizer_path
        this = "whose files have changed since" if path == ours else f"this run has {ours!r}"
        line = f"{taken}model.tokenizer_path={path!r}, {this}: ids mean other texts; {begin}"
        raise RunError(line)
    for key, value in asdict(identity).items():
        if key == "tokenizer_path" or saved.get(key, value) == value:
            continue
        changed = "the data's files have changed behind the same names and sizes: "
        name = f"training.{key}" if key in _TEXT_KEYS else key
        raise RunError(
            f"{changed if key == 'checksum' else ''}{taken}{name}={as_written(saved[key])}, "
            f"this run has {name}={as_written(value)}: {begin.replace(', or', ',')}, or leave the "
            'position out with checkpoint.exclude_from_loading=["dataloader"]'
        )
