"""A thread's time in a trace, cut into segments by region and phase."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from titan_moe.profiling.regions import PREFIX
from titan_moe.profiling.spans import Span

PHASES = ("forward", "recompute", "backward")
COMPILED, FSDP, OTHER = "compiled", "fsdp", "other"
BACKWARD = "autograd::engine::evaluate_function"
_COMPILED = "Torch-Compiled Region"
_LOOK_BACK = 16
Event = dict[str, Any]
Instant = tuple[Any, float]
"""A thread and a time."""


class RegionPhase(NamedTuple):
    """What an instant belongs to."""

    region: str
    phase: str


def span_of(event: Event) -> Span:
    """From its begin to its end."""
    return event["ts"], event["ts"] + event["dur"]


class Segment(NamedTuple):
    """A stretch of a thread's time with one innermost event."""

    start: float
    end: float
    place: RegionPhase
    name: str | None
    """The innermost event's; None where only annotations are around, or nothing."""


class Thread:
    """The events of one thread, nested, as segments of time."""

    def __init__(self, thread: Any, events: list[Event], regions: "Regions") -> None:
        self.segments: list[Segment] = []
        self.calls: Counter[str] = Counter()
        # Of events that begin together the longer one is around the other.
        events = sorted(events, key=lambda e: (e["ts"], -e["dur"]))
        stack: list[tuple[float, RegionPhase, str | None]] = []
        now = events[0]["ts"] if events else 0.0

        def advance(to: float) -> None:
            nonlocal now
            if to > now:
                _, place, name = stack[-1] if stack else (0.0, RegionPhase(OTHER, "forward"), None)
                self.segments.append(Segment(now, to, place, name))
                now = to

        for event in events:
            start, end = span_of(event)
            while stack and stack[-1][0] <= start:
                advance(stack[-1][0])
                stack.pop()
            advance(start)
            around = stack[-1][1] if stack else RegionPhase(OTHER, "forward")
            place = self._innermost(event, thread, around, regions)
            # An event that outlives its parent by rounding ends with it.
            end = min(end, stack[-1][0]) if stack else end
            name = event["name"] if event.get("cat") == "cpu_op" else None
            stack.append((end, place, name if name else (stack[-1][2] if stack else None)))
        while stack:
            advance(stack[-1][0])
            stack.pop()
        self._starts = [segment.start for segment in self.segments]

    def _innermost(
        self, event: Event, thread: Any, around: RegionPhase, regions: "Regions"
    ) -> RegionPhase:
        name = event["name"]
        if event.get("cat") == "user_annotation":
            if name.startswith(PREFIX):
                region = name.removeprefix(PREFIX)
                if around.phase == "forward":
                    self.calls[region] += 1
                    return RegionPhase(region, "forward")
                return RegionPhase(region, "recompute")
            return RegionPhase(FSDP, around.phase) if name.startswith("FSDP::") else around
        if name.startswith(_COMPILED):
            return RegionPhase(
                COMPILED, "recompute" if around.phase == "backward" else around.phase
            )
        if name.startswith(BACKWARD):
            return RegionPhase(OTHER, "backward")
        made_at = regions.forward_of.get((thread, event["ts"]))
        if made_at is not None and around.phase == "backward":
            return RegionPhase(regions.region_at(*made_at), "backward")
        return around

    def at(self, time: float) -> Segment | None:
        """The segment around an instant."""
        index = bisect_right(self._starts, time) - 1
        if index < 0 or time > self.segments[index].end:
            return None
        return self.segments[index]


class Regions:
    """The regions around each thread's instants: what a backward operation is found by."""

    def __init__(self, events: Iterable[Event], forward_of: dict[Instant, Instant]) -> None:
        self.forward_of = forward_of
        spans: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        for event in events:
            if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX):
                spans[event["tid"]].append((*span_of(event), event["name"].removeprefix(PREFIX)))
            elif event["name"].startswith(_COMPILED):
                spans[event["tid"]].append((*span_of(event), COMPILED))
        self._spans = {thread: sorted(found) for thread, found in spans.items()}

    def region_at(self, thread: Any, time: float) -> str:
        spans = self._spans.get(thread, [])
        begun = bisect_right(spans, (time, float("inf"), ""))
        # Regions hardly nest: the last to begin, or one of the few before it.
        for start, end, region in reversed(spans[max(0, begun - _LOOK_BACK) : begun]):
            if start <= time <= end:
                return region
        return OTHER
