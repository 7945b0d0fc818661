"""The steps of one data rank, the rank's place in the data, and the loader that reads ahead.

Python runs one thread at a time. In the process that launches a GPU's kernels, tokenizing and
packing would keep the launching thread waiting: there a process of its own reads.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from titan_moe.config.errors import ConfigError, as_written
from titan_moe.config.job_config import Training
from titan_moe.config.plugins import import_modules
from titan_moe.data.batch import Batch, PackedSequence, stack_sequences
from titan_moe.data.order import Assignment
from titan_moe.data.packed_conversations import ConversationSequences
from titan_moe.data.sequences import Identity, TextSequences
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.launch import end_with_parent

if TYPE_CHECKING:
    import torch

Microbatches = list[list[PackedSequence]]


@dataclass
class StepReader:
    """Reads the microbatches of one data rank, step by step."""

    sequences: TextSequences | ConversationSequences
    local_batch_size: int
    step: int = 0
    """The step that was read last."""

    @property
    def identity(self) -> Identity:
        return self.sequences.identity

    def read_step(self) -> Microbatches:
        """All microbatches of the next step, in order. RunError when the data ran out or cannot be
        read."""
        try:
            packed = self.sequences.next_batch()
        except RunError as error:
            raise RunError(f"step {self.step + 1}: {error}") from None
        except Exception as error:  # A disk, a network, a damaged file: each raises its own.
            reason = (str(error).splitlines() or [""])[0]
            raise RunError(
                f"step {self.step + 1}: reading the dataset {self.identity.fingerprint} failed: "
                f"{type(error).__name__}: {reason}"
            ) from error
        self.step += 1
        size = self.local_batch_size
        assert len(packed) % size == 0
        return [packed[first : first + size] for first in range(0, len(packed), size)]

    def count_steps(self) -> int:
        """The steps from here to the end of conversations, which end."""
        assert isinstance(self.sequences, ConversationSequences)
        return -(-self.sequences.count() // self.identity.global_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the place in the data after the last step that was read."""
        place = self.sequences.state()
        return {"identity": asdict(self.identity), "step": self.step, **place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the step at which `state`, merged over all ranks, was taken.

        The number of data ranks may differ from then. RunError if the state is another stream's.
        """
        _check_identity(state, self.identity)
        self.sequences.load_state(state)
        self.step = state["step"]

    def close(self) -> None:
        """Has nothing to end; `ReaderProcess` does."""


class ReaderProcess:
    """Runs a `StepReader` in a child process, with the same methods."""

    def __init__(
        self,
        build: Callable[..., StepReader],
        training: Training,
        tokenizer_path: str,
        imports: Sequence[str] = (),
        **place: Any,
    ) -> None:
        """`build`: `build_reader`, which gets the keywords `place`, and whose errors are raised.
        `imports`: job.imports."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._child.start()
        # Python's own end would wait for it, and it ignores the SIGTERM that it then gets.
        atexit.register(self._child.kill)
        theirs.close()
        self.identity = self._ask(build, training, tokenizer_path, imports, place)

    def read_step(self) -> Microbatches:
        return self._ask("read_step")

    def count_steps(self) -> int:
        return self._ask("count_steps")

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ask("load_state_dict", state)

    def close(self) -> None:
        """End the child at once; a `read_step` that another thread waits in raises RunError."""
        self._child.kill()
        self._child.join()

    def _ask(self, *request: Any) -> Any:
        """Returns the child's answer, and keeps the reader's state after it."""
        try:
            self._pipe.send(request)
            error, answer, state = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._child.join()
            code = self._child.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended: {code}"
            guess = " (often: out of memory)" if code == -signal.SIGKILL else ""
            raise RunError(
                f"the process that reads the data {how}{guess}: start again from the latest "
                "checkpoint"
            ) from None
        if error is not None:
            raise error
        self._state = state
        return answer


def _serve(pipe: Connection) -> None:
    """Answer the rank's requests in the child, until the rank is gone: the first makes the reader,
    each later one names a method and its arguments."""
    # They go to all processes of a terminal or a job, and are the rank's to answer.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    reader: StepReader | None = None
    while True:
        try:
            request = pipe.recv()
        except (EOFError, ConnectionError):
            os._exit(0)  # A library's thread that waits for a network would keep the process.
        reply: tuple[Exception | None, Any, Any]
        try:
            if reader is None:
                build, training, tokenizer_path, imports, place = request
                if problems := import_modules(imports):
                    raise ConfigError(problems)
                reader = build(training, load_tokenizer(tokenizer_path, training), **place)
                answer = reader.identity
            else:
                method, *arguments = request
                answer = getattr(reader, method)(*arguments)
            reply = None, answer, reader.state_dict()
        except (ConfigError, RunError) as error:
            reply = error, None, None
        pipe.send(reply)


@dataclass
class Loader:
    """Yields the microbatches of one data rank, step by step.

    One background thread reads up to `prefetch_factor` steps ahead of the caller. The state belongs
    to the last step handed out; steps that were read ahead are read again after a resume.
    """

    reader: StepReader | ReaderProcess
    prefetch_factor: int
    pin_for: torch.device | None = None
    """The CUDA device that page-locked memory is copied to; None: plain memory."""

    def __post_init__(self) -> None:
        self.identity = self.reader.identity
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="data", initializer=self._begin_thread
        )
        self._ahead: deque[Future[tuple[list[Batch], dict[str, Any]]]] = deque()
        self._state = self.reader.state_dict()

    def next_step(self) -> list[Batch]:
        """All microbatches of the next step, in order.

        RunError when the data ran out or cannot be read; asking again raises the same error.
        """
        self._read_ahead()
        batches, state = self._ahead[0].result()
        self._ahead.popleft()
        self._read_ahead()
        self._state = state
        return batches

    def count_steps(self) -> int:
        """The steps from here to the end of training.epochs; before `next_step`."""
        return self.reader.count_steps()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state after the last step handed out: this rank's sequences by number."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the step at which `state`, merged over all ranks, was taken.

        The number of data ranks may differ from then. RunError if the state is another stream's.
        """
        self._forget_ahead()
        self.reader.load_state_dict(state)
        self._state = self.reader.state_dict()

    def close(self) -> None:
        """End the background thread, after the step it is reading, and the reader's process."""
        self.reader.close()
        self._forget_ahead()
        self._thread.shutdown()

    def _read_ahead(self) -> None:
        while len(self._ahead) < self.prefetch_factor:
            self._ahead.append(self._thread.submit(self._read_step))

    def _forget_ahead(self) -> None:
        for future in reversed(self._ahead):
            future.cancel()
        wait(self._ahead)  # The thread must leave the reader alone.
        self._ahead.clear()

    def _begin_thread(self) -> None:
        if self.pin_for is not None:
            import torch

            # A thread's own device is the first: page-locked memory would make a context there.
            torch.cuda.set_device(self.pin_for)

    def _read_step(self) -> tuple[list[Batch], dict[str, Any]]:
        microbatches, pin = self.reader.read_step(), self.pin_for is not None
        batches = [stack_sequences(sequences, pin=pin) for sequences in microbatches]
        return batches, self.reader.state_dict()


# --- places in the data ---


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state of all sequences from the states of all data ranks, taken at the same step."""
    assert len({state["step"] for state in states}) == 1
    if "rows" not in states[0]:  # Of conversations each rank's state is that of all sequences.
        return states[0]
    sequences: dict[str, Any] = {}
    for state in states:
        sequences |= state["rows"]
    marks = [_merge_marks(of_part) for of_part in zip(*(s["marks"] for s in states), strict=True)]
    ordered = dict(sorted(sequences.items(), key=lambda item: int(item[0])))
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
    return sum(sequence["without_text"] for sequence in state.get("rows", {}).values())


def first_without_text(state: dict[str, Any]) -> str:
    """Names one of these documents; empty if there is none."""
    rows = state.get("rows", {}).values()
    return next(filter(None, (row.get("first_without") for row in rows)), "")


def continue_state(state: dict[str, Any], saved: Identity, identity: Identity) -> dict[str, Any]:
    """Convert `state`, merged over all ranks and taken under `saved`, for the loader of a training
    stage of another global_batch_size or seq_len.

    Conversations go on with the next one. Of texts, each sequence goes on at its cursor with
    another seq_len. With another global_batch_size new sequences begin, in each partition after the
    last document that any sequence has begun; the rest of those documents is left unread. RunError
    if the state was taken under neither.
    """
    if state["identity"] == asdict(identity):
        return state
    _check_identity(state, saved)
    moved = state | {"identity": asdict(identity)}
    size = saved.global_batch_size
    if identity.global_batch_size == size or "rows" not in state:
        return moved
    sequences, first = state["rows"], state["first"]
    begins = [
        _first_unbegun(at, {b: sequences[str(b)]["read"][source] for b in range(size)})
        for source, at in enumerate(first)
    ]
    zeros = [0] * len(first)
    fresh = {"read": zeros, "tokens": zeros, "part": -1, "offset": 0}
    begun = {str(b): fresh | {"without_text": 0} for b in range(identity.global_batch_size)}
    begun["0"]["without_text"] = documents_without_text(state)
    return moved | {"first": begins, "rows": begun}


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
