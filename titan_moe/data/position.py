"""The place in the data that a checkpoint keeps, checked before it is used."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

from titan_moe.runtime.errors import RunError
from titan_moe.runtime.records import Count, StrictRecord, first_problem

_Pair = Annotated[tuple[Count, str], Field(strict=False)]  # JSON has lists alone.


class _Identity(StrictRecord):
    """As step_reader.Identity."""

    model_config = ConfigDict(extra="forbid")

    fingerprint: str
    seed: int
    global_batch_size: Annotated[Count, Field(gt=0)]
    seq_len: Annotated[Count, Field(gt=0)]
    checksum: str = ""


class _Row(StrictRecord):
    """Of one sequence of the global batch, as SequenceStream.state gives it."""

    read: list[Count]
    tokens: list[Count]
    part: Annotated[int, Field(ge=-1)]
    offset: Count
    unread: Count = 0
    bad: list[_Pair] = Field(default_factory=list)


class _Position(StrictRecord):
    """As StepReader.state_dict gives it, merged over all ranks."""

    identity: _Identity
    step: Count
    rows: dict[str, _Row]
    marks: list[Any]
    first: list[Count | Annotated[list[Count], Field(min_length=1)]] = Field(default_factory=list)
    bad: list[_Pair] = Field(default_factory=list)


class _Place(StrictRecord):
    """As stream_order.Cursor, whose `stream` the stream itself must judge."""

    position: Count
    files: Count
    number: Count


def check_position(state: object) -> None:
    """RunError naming the key, if `state` can be no data position.

    Whether it is one of this run's data, the reader judges.
    """
    try:
        position = _Position.model_validate(state)
        _check_lengths(position)
        for part, mark in enumerate(position.marks):
            first = position.first[part] if position.first else 0
            _check_mark(mark, f"marks.{part}", len(first) if isinstance(first, list) else 1)
    except ValidationError as error:
        raise damaged(first_problem(error)) from None


def damaged(problem: str) -> RunError:
    """The error about a position that makes no sense."""
    return RunError(
        f"the checkpoint's data position (data of train_state.json) is damaged: {problem}: choose "
        "an earlier checkpoint with checkpoint.load_step, or leave the position out with "
        'checkpoint.exclude_from_loading=["dataloader"]'
    )


def _check_lengths(position: _Position) -> None:
    """All that has an entry for each part of the blend must have as many."""
    parts = len(position.marks)
    if "first" in position.model_fields_set and len(position.first) != parts:
        raise damaged(f"first has {len(position.first)} entries and marks {parts}")
    for name, row in position.rows.items():
        if not len(row.read) == len(row.tokens) == parts:
            raise damaged(f"rows.{name} has other parts than marks")
        if row.part >= parts or (row.part >= 0 and row.read[row.part] == 0):
            raise damaged(f"rows.{name}.part: it has read nothing of part {row.part}")
    for name, bad in [
        ("bad", position.bad),
        *((f"rows.{n}.bad", r.bad) for n, r in position.rows.items()),
    ]:
        if len(bad) not in (0, parts):
            raise damaged(f"{name} has {len(bad)} entries and marks {parts}")


def _check_mark(mark: Any, key: str, partitions: int) -> None:
    """Of one part: nothing, or a place for each partition, which may be none of this rank's."""
    if mark is None:
        return
    if not isinstance(mark, list):
        raise damaged(f"{key}: Input should be a valid list")
    places = [mark] if mark and isinstance(mark[0], int) else mark  # Of a version with one.
    if len(places) != partitions:
        raise damaged(f"{key}: it has {len(places)} places and first {partitions}")
    for number, place in enumerate(places):
        if place is None:
            continue
        if not isinstance(place, list) or len(place) != len(_Place.model_fields) + 1:
            raise damaged(f"{key}.{number}: it has no four entries")
        try:
            _Place.model_validate(dict(zip(_Place.model_fields, place, strict=False)))
        except ValidationError as error:
            raise damaged(first_problem(error, f"{key}.{number}")) from None
