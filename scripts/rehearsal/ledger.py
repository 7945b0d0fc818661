"""What a rehearsed step did, and what of it is a finding."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from scripts.rehearsal.fusion import FUSED, Fusion
from scripts.rehearsal.kinds import COPIES as BY_FSDP
from scripts.rehearsal.kinds import ELEMENTWISE, HOST
from scripts.rehearsal.places import COPIES, FIRST_PAIRS, WAITS, Place, here
from scripts.rehearsal.work import Link, Now, Part, Tally, Whereabouts, Work, bytes_of, kind_of


class Finding(NamedTuple):
    """One line of what must not be."""

    kind: str
    place: Place
    detail: str

    def __str__(self) -> str:
        return f"{self.place}: {self.kind}: {self.detail}"


@dataclass
class Counts:
    """What a part of a step costs."""

    dispatches: float = 0
    """Operations that torch dispatches: what the host pays for."""
    kernels: float = 0
    """Operations among them that launch something, and launches of own kernels."""
    bytes_moved: float = 0
    """What the kernels read and write at least: every tensor of theirs once."""
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
    """Events of one rank by their place, and counts.

    `is_step` says whether a step runs: what a start copies or waits for is its own affair.
    """

    counts: Counts = field(default_factory=Counts)
    is_step: bool = False
    kernels: Counter[str] = field(default_factory=Counter)
    """Of this step, by name."""
    copies: Counter[tuple[Place, str]] = field(default_factory=Counter)
    waits: Counter[tuple[Place, str]] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    met_groups: set[str] = field(default_factory=set)
    """Groups whose communicator is made."""
    whereabouts: Whereabouts | None = None
    """Set where work is counted by its parts."""
    work: Tally = field(default_factory=lambda: defaultdict(Work))
    """Of all steps, by part and by link."""
    under_way: dict[int, tuple[Link, dict[str, float]]] = field(default_factory=dict)
    """Collectives that are not waited for yet, by what names their result: and the device's work
    so far, by kind."""
    done: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The device's work so far, as in `Work.covered`."""
    fusion: Fusion = field(default_factory=Fusion)

    def begin_step(self) -> None:
        self.is_step = True
        for each in (self.kernels, self.copies, self.waits):
            each.clear()  # type: ignore[attr-defined]

    def end_step(self) -> None:
        self.is_step = False

    def dispatched(self) -> None:
        """An operation of the host's, whether it launches a kernel or not. Of a compiled function
        only launches count."""
        now = self.whereabouts.now() if self.whereabouts is not None else None
        if now is None or not now.compiled:
            self._dispatches(now)

    def _dispatches(self, now: Now | None) -> None:
        self.counts.dispatches += 1
        if now is not None:
            self.work[Part(now.phase, now.region, HOST, "")].dispatches += 1

    def operated(
        self, name: str, kind: str, flops: float, tensors: list[Tensor], outputs: list[Tensor]
    ) -> None:
        """A launch by an operation of torch's."""
        now = self.whereabouts.now() if self.whereabouts is not None else None
        if now is None or not now.compiled or kind != ELEMENTWISE:
            self.kernel(name, bytes_of(name, tensors, outputs), flops, kind)
            return

        def emit(bytes_moved: float) -> None:
            self._dispatches(now)
            self._launches(now, FUSED, bytes_moved, 0.0, kind)

        self.fusion.add(now, tensors, outputs, emit)

    def kernel(self, name: str, bytes_moved: float, flops: float = 0.0, kind: str = "") -> None:
        """A launch; `kind` is one of kinds.py, by the name if it is left out."""
        self.fusion.close()
        now = self.whereabouts.now() if self.whereabouts is not None else None
        if now is not None and now.compiled:
            self._dispatches(now)
        self._launches(now, name, bytes_moved, flops, kind)

    def _launches(
        self, now: Now | None, name: str, bytes_moved: float, flops: float, kind: str
    ) -> None:
        self.counts.kernels += 1
        self.counts.bytes_moved += bytes_moved
        if self.is_step:
            self.kernels[name] += 1
        if now is None:
            return
        kind = BY_FSDP if now.region == "fsdp" else kind or kind_of(name)
        self.work[Part(now.phase, now.region, kind, name)].add(Work(0, 1, bytes_moved, flops))
        self.done[kind] += flops or bytes_moved

    def linked(self, axis: str, op: str, num_bytes: float, places: tuple[int, int]) -> Link | None:
        """A collective over `places`: ranks, and the nodes that they are on."""
        if self.whereabouts is None:
            return None
        self.fusion.close()
        now = self.whereabouts.now()
        link = Link(now.phase, now.region, axis, op, *places)
        self.work[link].add(Work(1, 1, num_bytes))
        return link

    def started(self, link: Link, result: int) -> None:
        """Something is to be waited for."""
        self.under_way[result] = link, dict(self.done)

    def ended(self, result: int) -> None:
        """The device waits for it."""
        if result not in self.under_way:
            return
        self.fusion.close()
        link, before = self.under_way.pop(result)
        between = {kind: amount - before.get(kind, 0.0) for kind, amount in self.done.items()}
        self.work[link].add(Work(covered=between))

    def copied(self, what: str) -> None:
        if self.is_step:
            self.copies[here(), what] += 1

    def waited(self, why: str) -> None:
        self.counts.waits += 1
        if self.is_step:
            self.waits[here(), why] += 1

    def communicated(self, name: str, group: Any, devices: set[str]) -> None:
        """A collective, or a send or receive, before it begins."""
        if wrong := sorted(devices - {"cuda"}):
            detail = f"{name} of a tensor on {', '.join(wrong)}"
            self.findings.append(Finding("wrong device", here(), detail))
        is_pair = name in ("send", "recv_")
        if is_pair and group.size() > 2 and group.group_name not in self.met_groups:
            place = here()
            detail = (
                f"{name} is the first use of a group of {group.size()} ranks: NCCL makes its "
                "communicator with all of them"
            )
            if place.where not in FIRST_PAIRS:
                self.findings.append(Finding("hang", place, detail))
        self.met_groups.add(group.group_name)

    def judged(self, *, num_moe_layers: int, num_microbatches: int) -> Iterator[Finding]:
        """All findings, each once; of layers with bounded sizes, `num_moe_layers` is 0."""
        yield from dict.fromkeys(self.findings)
        for (place, what), calls in self.copies.items():
            if place.where not in COPIES:
                yield Finding("copy", place, f"{what}, {calls} x")
        in_layers, most = 0, num_moe_layers * num_microbatches
        for (place, why), calls in self.waits.items():
            allowed = WAITS.get(place.where)
            if allowed is None:
                yield Finding("wait", place, f"{why}, {calls} x")
            elif allowed.times == "step" and calls > 1:
                yield Finding("wait", place, f"{why}, {calls} x, where once a step is allowed")
            elif allowed.times == "layer":
                in_layers += calls
                if in_layers > most:
                    detail = f"{why}, {in_layers} x in all MoE layers, where {most} are allowed"
                    yield Finding("wait", place, detail)
