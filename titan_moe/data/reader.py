"""The steps of one data rank, and the rank's place in the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from titan_moe.config.errors import as_written
from titan_moe.data.batch import PackedSequence
from titan_moe.data.order import Assignment
from titan_moe.data.packed_conversations import ConversationSequences
from titan_moe.data.sequences import Identity, TextSequences
from titan_moe.runtime.errors import RunError

Microbatches = list[list[PackedSequence]]


class StepReader:
    """Reads the microbatches of one data rank, step by step."""

    def __init__(
        self,
        sequences: TextSequences | ConversationSequences,
        *,
        identity: Identity,
        local_batch_size: int,
    ) -> None:
        self.identity = identity
        self.sequences = sequences
        self._local_batch_size = local_batch_size
        self._step = 0

    def read_step(self) -> Microbatches:
        """All microbatches of the next step, in order. RunError when the data ran out or cannot be
        read."""
        try:
            packed = self.sequences.next_batch()
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
        assert len(packed) % size == 0
        return [packed[first : first + size] for first in range(0, len(packed), size)]

    def count_steps(self) -> int:
        """The steps from here to the end of conversations, which end."""
        assert isinstance(self.sequences, ConversationSequences)
        return -(-self.sequences.count() // self.identity.global_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the place in the data after the last step that was read."""
        place = self.sequences.state()
        return {"identity": asdict(self.identity), "step": self._step, **place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the step at which `state`, merged over all ranks, was taken.

        The number of data ranks may differ from then. RunError if the state is another stream's.
        """
        _check_identity(state, self.identity)
        self.sequences.load_state(state)
        self._step = state["step"]

    def close(self) -> None:
        """Has nothing to end; `ReaderProcess` does."""


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
