"""What one data rank reads, step by step, and its place in the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from titan_moe.data.bad_documents import BadDocuments, add_parts, as_json, from_json, refusal
from titan_moe.data.batch import PackedBatch, stack_sequences
from titan_moe.data.document_order import Assignment
from titan_moe.data.sequences import BlendSource, SequenceStream
from titan_moe.runtime.errors import RunError

_LONGEST = 400  # Characters of a fingerprint in a message.


@dataclass(frozen=True)
class Identity:
    """All that the token stream follows from: a data position means nothing under another one."""

    fingerprint: str
    """Tokenizer, sources and weights."""
    seed: int
    global_batch_size: int
    seq_len: int
    checksum: str = ""
    """Of the sources' files, sampled (data/content.py), with + between sources and - for one whose
    fingerprint says it; empty in positions of before it was kept."""


class StepReader:
    """Reads the microbatches of one data rank, step by step."""

    def __init__(
        self,
        streams: Sequence[SequenceStream],
        parts: Sequence[BlendSource],
        *,
        identity: Identity,
        local_batch_size: int,
        max_bad_documents: float,
    ) -> None:
        assert len(streams) % local_batch_size == 0
        self.identity = identity
        self._streams = streams
        self.parts = parts
        self._local_batch_size = local_batch_size
        self._max_bad_documents = max_bad_documents
        # Bad documents that no sequence here has read: left out at the start, or of stages before.
        self._bad_before = [part.order.left_out for part in parts]
        # Positions at which the sequences begin, by part and partition.
        self._first = [[0] * part.order.num_partitions for part in parts]
        self._step = 0

    def read_step(self) -> tuple[list[PackedBatch], dict[str, Any]]:
        """All microbatches of the next step, in order, and the state after it.

        RunError when the data ran out or cannot be read.
        """
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
        self._check_bad_documents()
        size = self._local_batch_size
        batches = [
            stack_sequences(packed[first : first + size]) for first in range(0, len(packed), size)
        ]
        return batches, self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: this rank's sequences by number, and from where on streams are read."""
        state = {
            "identity": asdict(self.identity),
            "step": self._step,
            "first": self._first,
            "rows": {str(stream.index): stream.state() for stream in self._streams},
            "marks": [
                part.order.mark(self._oldest(number)) for number, part in enumerate(self.parts)
            ],
        }
        if bad := as_json(self._bad_before):
            state["bad"] = bad
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the step at which `state`, merged over all ranks, was taken.

        The number of data ranks may differ from then. RunError if the state is another stream's.
        """
        _check_identity(state, self.identity)
        _check_rows(state, [stream.index for stream in self._streams])
        self._first = _first_positions(state)
        for part, mark, first in zip(self.parts, state["marks"], self._first, strict=True):
            part.order.seek(mark, first)
        for stream in self._streams:
            stream.load_state(state["rows"][str(stream.index)], self._first)
        self._step = state["step"]
        if "bad" in state:
            self._bad_before = from_json(state["bad"], len(self.parts))

    def close(self) -> None:
        """Nothing to end."""

    def _check_bad_documents(self) -> None:
        for number, part in enumerate(self.parts):
            bad = sum((stream.bad[number] for stream in self._streams), BadDocuments())
            line = refusal(
                part.order.name,
                bad,
                seen=sum(stream.num_opened(number) for stream in self._streams),
                size=part.order.size,
                most=self._max_bad_documents,
            )
            if line:
                raise RunError(f"step {self._step}: {line}")

    def _oldest(self, part: int) -> dict[int, int]:
        """First position, by partition of `part`, that a resume asks for."""
        oldest: dict[int, int] = {}
        for stream in self._streams:
            for partition, position in stream.oldest(part).items():
                oldest[partition] = min(position, oldest.get(partition, position))
        return oldest


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state of all sequences from the states of all data ranks, taken at the same step."""
    assert len({state["step"] for state in states}) == 1
    sequences: dict[str, Any] = {}
    for state in states:
        sequences |= state["rows"]
    marks = [_merge_marks(of_part) for of_part in zip(*(s["marks"] for s in states), strict=True)]
    ordered = dict(sorted(sequences.items(), key=lambda item: int(item[0])))
    return states[0] | {"rows": ordered, "marks": marks}


def _merge_marks(marks: Sequence[Any]) -> Any:
    """Of the places to read a partition on from, the earliest serves every sequence."""
    if marks[0] is None:
        return None
    return [
        min((place for place in places if place is not None), key=lambda p: p[0], default=None)
        for places in zip(*marks, strict=True)
    ]


def bad_documents(
    state: dict[str, Any], num_parts: int
) -> tuple[list[BadDocuments], list[BadDocuments]]:
    """By part: those that the sequences of `state` have read, and those of before, which all ranks'
    states name alike."""
    found = [BadDocuments()] * num_parts
    for row in state["rows"].values():
        found = add_parts(found, from_json(row.get("bad", []), num_parts))
    return found, from_json(state.get("bad", []), num_parts)


class Unread(NamedTuple):
    """What the sequences of a smaller or larger global batch leave behind."""

    tokens: int
    """Of documents that were begun."""
    documents: int
    """That were not begun, and lie before one that was."""


def continue_state(
    state: dict[str, Any], saved: Identity, identity: Identity
) -> tuple[dict[str, Any], Unread]:
    """`state`, merged over all ranks and taken under `saved`, as the loader of a training stage of
    another global_batch_size or seq_len goes on with it.

    With another seq_len each sequence goes on at its cursor. With another global_batch_size new
    sequences begin, in each partition after the last document that any sequence has begun. RunError
    if the state was taken under neither of the two.
    """
    if state["identity"] == asdict(identity):
        return state, Unread(0, 0)
    _check_identity(state, saved)
    moved = state | {"identity": asdict(identity)}
    size = saved.global_batch_size
    if identity.global_batch_size == size:
        return moved, Unread(0, 0)
    _check_rows(state, range(size))
    rows, first = state["rows"], _first_positions(state)
    begins = [
        _first_unbegun(at, {b: rows[str(b)]["read"][part] for b in range(size)})
        for part, at in enumerate(first)
    ]
    begun = sum(sum(row["read"]) for row in rows.values())
    fresh = {"read": [0] * len(first), "tokens": [0] * len(first), "part": -1, "offset": 0}
    sequences = {str(b): fresh | {"unread": 0} for b in range(identity.global_batch_size)}
    unread = Unread(
        # Checkpoints of earlier versions do not say it.
        tokens=sum(row.get("unread", 0) for row in rows.values()),
        documents=sum(map(sum, begins)) - sum(map(sum, first)) - begun,
    )
    if bad := as_json(add_parts(*bad_documents(state, len(first)))):
        moved["bad"] = bad
    return moved | {"first": begins, "rows": sequences}, unread


def _first_unbegun(first: Sequence[int], read: Mapping[int, int]) -> list[int]:
    """By partition of one part, the position after the last document that any sequence has begun.

    first: by partition, where the sequences began. read: documents that each has begun.
    """
    begins = list(first)
    assignment = Assignment(len(read), len(first))
    for sequence, count in read.items():
        turns = len(assignment.partitions(sequence))
        for number in range(max(0, count - turns), count):
            partition, offset = assignment.place(sequence, number)
            begins[partition] = max(begins[partition], first[partition] + offset + 1)
    return begins


def _first_positions(state: dict[str, Any]) -> list[list[int]]:
    """By part and partition. Earlier versions wrote a number, of their one partition, or, before
    there were training stages, nothing."""
    first = state.get("first", [0] * len(state["marks"]))
    return [[at] if isinstance(at, int) else list(at) for at in first]


def _check_rows(state: dict[str, Any], wanted: Iterable[int]) -> None:
    rows, size = state["rows"], state["identity"]["global_batch_size"]
    if missing := [index for index in wanted if str(index) not in rows]:
        raise RunError(
            f"the checkpoint's data position holds {len(rows)} sequences, but not sequence "
            f"{missing[0]} of global_batch_size={size}: it lacks a data rank's part"
        )


def _check_identity(state: dict[str, Any], identity: Identity) -> None:
    saved = Identity(**state["identity"])
    for key, ours in asdict(replace(identity, checksum=saved.checksum)).items():
        theirs = state["identity"].get(key, "")
        if theirs != ours:
            raise RunError(
                f"the checkpoint's data position was taken with {key}={_cut(repr(theirs))}, this "
                f"run has {key}={_cut(repr(ours))}: set it as it was, begin in another "
                "job.dump_folder, or leave the position out with "
                'checkpoint.exclude_from_loading=["dataloader"]'
            )
    if saved.checksum not in ("", identity.checksum):
        raise RunError(
            "the data's files have changed since the checkpoint, behind the same names and sizes: "
            f"their sampled checksum was {_cut(saved.checksum)} and is {identity.checksum}: put "
            "the old files back, begin in another job.dump_folder, or leave the position out with "
            'checkpoint.exclude_from_loading=["dataloader"]'
        )


def _cut(words: str) -> str:
    """Those that a damaged file holds may have no end."""
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."
