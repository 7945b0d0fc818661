"""Captures as whole tensors: all ranks' files of a step put together."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from titan_moe.config.errors import ConfigError
from titan_moe.training.capture.records import PHASES, Place

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

_BACKWARDS = ("backward", "gradient")


@dataclass(frozen=True)
class CapturedTensor:
    """All that a capture holds of one place."""

    kind: str
    """The kind of keys: see `records`."""
    keys: Ints
    """[N], ascending."""
    values: Array
    """[N, P] sketches, or [N, 1] numbers."""
    apart: Array
    """[N]: the largest distance between ranks' copies of the same shard."""


@dataclass(frozen=True)
class Capture:
    """The tensors of one step of a run, read from its capture."""

    facts: Mapping[str, Any]
    sequences: Sequence[int]
    """Fingerprints of the global batch's sequences, in the order of the ranks."""
    places: Mapping[Place, CapturedTensor]
    """Tensors by place, in the order in which a step computes them, phase by phase."""


def norms(values: Array) -> Array:
    """Returns the norms of the tensors that sketches stand for, [N]; a number's is its size."""
    return np.sqrt(np.square(values).mean(-1))


def read_capture(folder: Path) -> Capture:
    """Read a run's capture folder. Raises ConfigError where ranks' files are missing."""
    files = [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank-*.pt"))]
    facts = files[0]["facts"]
    if len(files) != facts["world_size"]:  # A machine may have written to a disk of its own.
        said = f"{len(files)} files of {facts['world_size']} ranks are here"
        raise ConfigError(f"{folder}: {said}: name a folder that all machines share with --out")
    sequences = dict.fromkeys(name for each in files for name in each["facts"]["rows"])
    held: dict[Place, list[dict[str, Any]]] = defaultdict(list)
    for each in files:
        for record in each["records"]:
            held[Place(*record["place"])].append(record)
    places = sorted(held, key=lambda place: _order(place, held[place]))
    wholes = {place: _whole(held[place]) for place in places}
    updates = [_update(wholes, place) for place in places if place.phase == "parameters"]
    return Capture(facts, list(sequences), wholes | dict(updates))


def _order(place: Place, records: Sequence[dict[str, Any]]) -> tuple[int, int, int]:
    stage, number = min(tuple(record["order"]) for record in records)
    sign = -1 if place.phase in _BACKWARDS else 1
    return list(PHASES).index(place.phase), sign * stage, sign * number


def _whole(records: Sequence[dict[str, Any]]) -> CapturedTensor:
    """Joins the records of one place: the first of several copies counts, summands are added."""
    keys, summands, values = (
        torch.cat([record[name] for record in records]).numpy()
        for name in ("keys", "parts", "values")
    )
    whole = np.unique(keys)
    sums, apart = np.zeros((len(whole), values.shape[1])), np.zeros(len(whole))
    for summand in np.unique(summands):
        held, known = values[summands == summand], keys[summands == summand]
        own, first, copied = np.unique(known, return_index=True, return_inverse=True)
        at = np.searchsorted(whole, own)
        sums[at] += held[first]
        with np.errstate(invalid="ignore"):
            far = norms(held - held[first][copied])
            far[first] = 0.0  # Nothing is another copy of itself, not even NaN.
            np.maximum.at(apart, at[copied], far)
    return CapturedTensor(records[0]["kind"], whole, sums, apart)


def _update(wholes: Mapping[Place, CapturedTensor], end: Place) -> tuple[Place, CapturedTensor]:
    """Returns what the step added to a parameter."""
    last = end.tensor.removeprefix("parameter of ")
    after, before = wholes[end], wholes[Place("start", end.module, last)]
    values, apart = after.values - before.values, np.zeros(len(after.keys))
    added = CapturedTensor(after.kind, after.keys, values, apart)
    return Place("update", end.module, f"update of {last}"), added
