"""Records a rehearsed step, and judges which of its events are findings."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from scripts.rehearsal.places import COPIES, WAITS, Place, here


class Finding(NamedTuple):
    """One line about something that must not happen."""

    kind: str
    place: Place
    detail: str

    def __str__(self) -> str:
        return f"{self.place}: {self.kind}: {self.detail}"


@dataclass
class Counts:
    """Costs of a part of a step."""

    dispatches: float = 0
    """Operations that torch dispatches, which cost the host time."""
    kernels: float = 0
    """Dispatched operations that launch a kernel, and launches of titan_moe's own kernels."""
    bytes_moved: float = 0
    """Least bytes that the kernels read and write: each of their tensors once."""
    collectives: float = 0
    bytes_sent: float = 0
    waits: float = 0

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(**{key: value - getattr(other, key) for key, value in vars(self).items()})

    def __truediv__(self, number: int) -> "Counts":
        return self * (1 / number)

    def __mul__(self, factor: float) -> "Counts":
        return Counts(**{key: value * factor for key, value in vars(self).items()})


@dataclass
class Ledger:
    """Counts one rank's events by their place.

    `is_step` says whether a step runs: copies and waits of the start are not findings.
    """

    counts: Counts = field(default_factory=Counts)
    is_step: bool = False
    copies: Counter[tuple[Place, str]] = field(default_factory=Counter)
    waits: Counter[tuple[Place, str]] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    met_groups: set[str] = field(default_factory=set)
    """Groups that have a communicator."""

    def begin_step(self) -> None:
        self.is_step = True
        self.copies.clear()
        self.waits.clear()

    def end_step(self) -> None:
        self.is_step = False

    def kernel(self, bytes_moved: float) -> None:
        """Counts a launch that reads and writes at least `bytes_moved`."""
        self.counts.kernels += 1
        self.counts.bytes_moved += bytes_moved

    def copied(self, what: str) -> None:
        if self.is_step:
            self.copies[here(), what] += 1

    def waited(self, why: str) -> None:
        self.counts.waits += 1
        if self.is_step:
            self.waits[here(), why] += 1

    def communicated(self, name: str, group: Any, devices: set[str]) -> None:
        """Checks a collective, or a send or receive, before it begins."""
        if wrong := sorted(devices - {"cuda"}):
            detail = f"{name} of a tensor on {', '.join(wrong)}"
            self.findings.append(Finding("wrong device", here(), detail))
        if self.is_step and group.size() > 1 and group.group_name not in self.met_groups:
            detail = f"{name} makes the communicator of {group.size()} ranks inside a step"
            self.findings.append(Finding("late communicator", here(), detail))
        self.met_groups.add(group.group_name)

    def judged(self, *, waits_in_layers: int) -> Iterator[Finding]:
        """Yields all findings, each once; `waits_in_layers`: how many are allowed in MoE layers."""
        yield from dict.fromkeys(self.findings)
        for (place, what), calls in self.copies.items():
            if place.where not in COPIES:
                yield Finding("copy", place, f"{what}, {calls} x")
        in_layers = 0
        for (place, why), calls in self.waits.items():
            allowed = WAITS.get(place.where)
            if allowed is None:
                yield Finding("wait", place, f"{why}, {calls} x")
            elif allowed.times == "step" and calls > 1:
                yield Finding("wait", place, f"{why}, {calls} x, where once a step is allowed")
            elif allowed.times == "layer":
                in_layers += calls
                if in_layers > waits_in_layers:
                    most = f"where {waits_in_layers} are allowed"
                    detail = f"{why}, {in_layers} x in all MoE layers, {most}"
                    yield Finding("wait", place, detail)


_READS_ROWS = {"embedding", "gather", "index", "index_select"}
_WRITES_ROWS = {
    "index_add_", "index_copy_", "index_put_", "_index_put_impl_", "scatter_", "scatter_add_",
    "scatter_reduce_",
}  # fmt: skip
_ONLY_WRITES = {"_foreach_copy_", "_foreach_zero_", "copy_", "fill_", "zero_"}


def bytes_of(name: str, tensors: list[Tensor], outputs: list[Tensor]) -> float:
    """Returns the least bytes that an operation moves: each tensor once, changed ones twice.

    An operation that picks rows of a larger tensor counts these rows alone.
    """
    distinct = {id(x): x for x in tensors}
    read, written = sum(x.nbytes for x in distinct.values()), sum(x.nbytes for x in outputs)
    if name in _READS_ROWS:
        return 2 * written + sum(x.nbytes for x in tensors[1:])
    if name in _WRITES_ROWS:
        return 2 * sum(x.nbytes for x in tensors[1:])
    return read if name in _ONLY_WRITES else read + written
