"""Captures as whole tensors: all ranks' files of a step put together."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from titan_moe.config.errors import ConfigError
from titan_moe.verify.localize.capture.records import PHASES, Place

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

_BACKWARDS = ("backward", "gradient")


class Copies(NamedTuple):
    """Holds values that several ranks keep of the same part: each further copy beside the first."""

    keys: Ints
    """[M, 2]"""
    ranks: Ints
    """[M, 2]: whose copies these are."""
    first: Array
    other: Array
    """[M, C] each."""


@dataclass(frozen=True)
class CapturedTensor:
    """All that a capture holds of one place."""

    place: Place
    keys_are: str
    """"tokens": (row, position); "experts": (expert, 0); "tensor": (0, 0); "numbers": (i, 0)."""
    keys: Ints
    """[N, 2], ascending."""
    values: Array
    """[N, 1 + P] sketches, or [N, 1] numbers."""
    exact: bool
    """True if the sums of squares are valid: not for values summed from parts, nor for updates."""
    copies: Copies
    beside: Mapping[str, NDArray] = field(default_factory=dict)
    """More of each key."""


@dataclass(frozen=True)
class Capture:
    """One step of one run."""

    facts: Mapping[str, Any]
    rows: Sequence[int]
    """Fingerprints of the global batch's rows, in the order of the ranks."""
    places: Mapping[Place, CapturedTensor]
    """In the order in which a step makes one from the other, phase by phase."""


def read_capture(folder: Path) -> Capture:
    """Read a run's capture folder. Raises ConfigError where ranks' files are missing."""
    paths = sorted(folder.glob("rank-*.pt"))
    if not paths:
        raise ConfigError([f"{folder}: no capture is there: train with debug.capture_step=STEP"])
    files = [torch.load(path, weights_only=True) for path in paths]
    facts = files[0]["facts"]
    if len(files) != facts["world_size"] or len({f["facts"]["step"] for f in files}) > 1:
        said = f"{len(files)} files of {facts['world_size']} ranks' capture of one step"
        raise ConfigError([f"{folder}: {said}: capture again into an empty folder"])
    rows = dict.fromkeys(row for each in files for row in each["facts"]["rows"])
    held: dict[Place, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for each in files:
        for record in each["records"]:
            held[Place(*record["place"])].append((each["facts"]["rank"], record))
    places = sorted(held, key=lambda place: _order(place, held[place]))
    wholes = {place: _whole(place, held[place]) for place in places}
    ends = [place for place in places if place.phase == "parameters"]
    wholes |= {(made := _update(wholes, place)).place: made for place in ends}
    return Capture(facts, list(rows), wholes)


def _order(place: Place, records: Sequence[tuple[int, dict[str, Any]]]) -> tuple[int, int, int]:
    stage, number = min(tuple(record["order"]) for _, record in records)
    sign = -1 if place.phase in _BACKWARDS else 1
    return list(PHASES).index(place.phase), sign * stage, sign * number


def _whole(place: Place, records: Sequence[tuple[int, dict[str, Any]]]) -> CapturedTensor:
    """Copies are kept once, parts are added."""
    keys_are, exact = records[0][1]["kind"][0], all(record["kind"][1] for _, record in records)
    names = [n for n in records[0][1] if n not in ("place", "kind", "order")]
    joined = {name: torch.cat([record[name] for _, record in records]).numpy() for name in names}
    ranks = np.concatenate(
        [np.full(len(record["keys"]), rank, dtype=np.int64) for rank, record in records]
    )
    keys, parts, values = joined.pop("keys"), joined.pop("parts"), joined.pop("values")
    order = np.lexsort((ranks, parts, keys[:, 1], keys[:, 0]))
    keys, parts, values, ranks = keys[order], parts[order], values[order], ranks[order]
    new_key = _changes(keys)
    new_part = new_key | _changes(parts[:, None])
    first = np.flatnonzero(new_part)
    of_first = first[np.cumsum(new_part) - 1]
    other = np.flatnonzero(~new_part)
    copies = Copies(
        keys[other],
        np.stack([ranks[of_first[other]], ranks[other]], 1),
        values[of_first[other]],
        values[other],
    )
    starts = np.flatnonzero(new_key)
    group = (np.cumsum(new_key) - 1)[first]
    sums = np.zeros((len(starts), values.shape[1]))
    np.add.at(sums, group, values[first])
    beside = {name: array[order][starts] for name, array in joined.items()}
    return CapturedTensor(place, keys_are, keys[starts], sums, exact, copies, beside)


def _update(wholes: Mapping[Place, CapturedTensor], end: Place) -> CapturedTensor:
    """Returns what the step added to a parameter. Only sums of squares cannot be subtracted."""
    last = end.tensor.removeprefix("parameter of ")
    after, before = wholes[end], wholes[Place("start", end.module, last)]
    keys, ranks, first, other = after.copies
    none = Copies(keys[:0], ranks[:0], first[:0], other[:0])
    place = Place("update", end.module, f"update of {last}")
    values = after.values - before.values
    return replace(after, place=place, values=values, exact=False, copies=none)


def _changes(rows: NDArray) -> NDArray[np.bool_]:
    """Returns a mask of the rows that differ from the row before; the first row always counts."""
    changed = np.ones(len(rows), dtype=bool)
    changed[1:] = (rows[1:] != rows[:-1]).any(1)
    return changed
