"""One rank's torch.profiler trace, cut into who spent which time.

Forward: an instant belongs to the innermost region around it (profiling/regions.py). Backward: to
the region that made the autograd node which runs, by the arrows from forward operations
to backward ones. A region that runs inside the backward is a recomputation. FSDP names its own
work, and so does torch.compile: a compiled layer is one region.

On a CPU the time is that of the thread that trains; a rank communicates while gloo's threads run a
collective. On a GPU it is that of kernels, each belonging to the instant that launched it; a rank
communicates while NCCL's kernels run. Communication is exposed while nothing is computed.
"""

import gzip
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titan_moe.profiling.regions import PREFIX

PHASES = ("forward", "recompute", "backward")
COMPILED, FSDP, OTHER = "compiled", "fsdp", "other"
_COMPILED = "Torch-Compiled Region"
_BACKWARD = "autograd::engine::evaluate_function"
_WAITING = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")
_LOOK_BACK = 16
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")

Span = tuple[float, float]
"""Start and end in microseconds."""


class TraceError(Exception):
    """One line for the user: what is wrong with a file."""


class Place(NamedTuple):
    """Whose time it is."""

    region: str
    phase: str


@dataclass
class RankProfile:
    """What one trace says, in microseconds."""

    rank: int
    on_gpu: bool
    num_steps: int
    wall: float
    """From the first recorded step's begin to the last one's end."""
    times: dict[Place, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    """How often each region began in a forward pass."""
    communication: float = 0.0
    """Time with a collective under way."""
    exposed: float = 0.0
    """That of it in which nothing was computed."""
    collectives: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Durations by name."""
    kernels: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By name: kernels on a GPU, an operation's own time on a CPU; no collectives."""

    @property
    def idle(self) -> float:
        """Neither computing nor communicating: what is left of the wall time."""
        return max(0.0, self.wall - sum(self.times.values()) - self.exposed)


def read_trace(path: Path) -> RankProfile:
    """Read `rank-R.json.gz` or `.json`. Raises TraceError."""
    trace = _load(path)
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    rank = (trace.get("distributedInfo") or {}).get("rank", 0)
    annotations = [e for e in events if e.get("cat") == "user_annotation"]
    regions = Counter(e["tid"] for e in annotations if e["name"].startswith(PREFIX))
    if not regions:
        raise TraceError(
            f"{path}: names none of titan_moe's regions: profile a run of it, with "
            f"--profiling.enable_profiling"
        )
    main = regions.most_common(1)[0][0]
    steps = [_span(e) for e in annotations if e["name"].startswith("ProfilerStep#")]
    own = [_span(e) for e in events if e["tid"] == main]
    window = _hull(steps or own)
    arrows = _arrows(trace["traceEvents"])
    kernels = [e for e in events if e.get("cat") in _ON_DEVICE]
    profile = RankProfile(rank, bool(kernels), max(1, len(steps)), window[1] - window[0])
    if kernels:
        _device(profile, events, kernels, arrows)
    else:
        _host(profile, [e for e in events if e["tid"] == main], events, arrows, window)
    return profile


def _load(path: Path) -> dict[str, Any]:
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except (OSError, EOFError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read as a trace: {error}") from None
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise TraceError(f"{path}: is no trace of torch.profiler")
    return trace


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _hull(spans: Sequence[Span]) -> Span:
    return min(start for start, _ in spans), max(end for _, end in spans)


def _arrows(events: Iterable[dict[str, Any]]) -> dict[tuple[Any, float], tuple[Any, float]]:
    """(thread, time) where a backward operation begins -> where its forward one did."""
    starts, found = {}, {}
    for event in events:
        if event.get("cat") == "fwdbwd" and event.get("ph") == "s":
            starts[event["id"]] = event["tid"], event["ts"]
    for event in events:
        if event.get("cat") == "fwdbwd" and event.get("ph") == "f" and event["id"] in starts:
            found[event["tid"], event["ts"]] = starts[event["id"]]
    return found


class Segment(NamedTuple):
    """A stretch of a thread's time with one innermost event."""

    start: float
    end: float
    place: Place
    name: str | None
    """The innermost event's; None where only annotations are around, or nothing."""


class _Thread:
    """The events of one thread as a stack over time."""

    def __init__(self, thread: Any, events: list[dict[str, Any]], places: "_Places") -> None:
        self.segments: list[Segment] = []
        self.calls: Counter[str] = Counter()
        # Of events that begin together the longer one is around the other.
        events = sorted(events, key=lambda e: (e["ts"], -e["dur"]))
        stack: list[tuple[float, Place, str | None]] = []
        now = events[0]["ts"] if events else 0.0

        def advance(to: float) -> None:
            nonlocal now
            if to > now:
                _, place, name = stack[-1] if stack else (0.0, Place(OTHER, "forward"), None)
                self.segments.append(Segment(now, to, place, name))
                now = to

        for event in events:
            start, end = _span(event)
            while stack and stack[-1][0] <= start:
                advance(stack[-1][0])
                stack.pop()
            advance(start)
            around = stack[-1][1] if stack else Place(OTHER, "forward")
            place = self._place(event, thread, around, places)
            # An event that outlives its parent by rounding ends with it.
            end = min(end, stack[-1][0]) if stack else end
            name = event["name"] if event.get("cat") == "cpu_op" else None
            stack.append((end, place, name if name else (stack[-1][2] if stack else None)))
        while stack:
            advance(stack[-1][0])
            stack.pop()
        self._starts = [segment.start for segment in self.segments]

    def _place(self, event: dict[str, Any], thread: Any, around: Place, places: "_Places") -> Place:
        name = event["name"]
        if event.get("cat") == "user_annotation":
            if name.startswith(PREFIX):
                region = name.removeprefix(PREFIX)
                if around.phase == "forward":
                    self.calls[region] += 1
                    return Place(region, "forward")
                return Place(region, "recompute")
            return Place(FSDP, around.phase) if name.startswith("FSDP::") else around
        if name.startswith(_COMPILED):
            return Place(COMPILED, "recompute" if around.phase == "backward" else around.phase)
        if name.startswith(_BACKWARD):
            return Place(OTHER, "backward")
        made_at = places.arrows.get((thread, event["ts"]))
        if made_at is not None and around.phase == "backward":
            return Place(places.region_at(*made_at), "backward")
        return around

    def at(self, time: float) -> Segment | None:
        """The segment around an instant."""
        index = bisect_right(self._starts, time) - 1
        if index < 0 or time > self.segments[index].end:
            return None
        return self.segments[index]


class _Places:
    """Which region is around a thread's instant: what the backward's arrows point at."""

    def __init__(self, events: Iterable[dict[str, Any]], arrows: dict[Any, Any]) -> None:
        self.arrows = arrows
        spans: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        for event in events:
            if event.get("cat") == "user_annotation" and event["name"].startswith(PREFIX):
                spans[event["tid"]].append((*_span(event), event["name"].removeprefix(PREFIX)))
            elif event["name"].startswith(_COMPILED):
                spans[event["tid"]].append((*_span(event), COMPILED))
        self._spans = {thread: sorted(found) for thread, found in spans.items()}

    def region_at(self, thread: Any, time: float) -> str:
        spans = self._spans.get(thread, [])
        begun = bisect_right(spans, (time, float("inf"), ""))
        # Regions hardly nest: the last to begin, or one of the few before it.
        for start, end, region in reversed(spans[max(0, begun - _LOOK_BACK) : begun]):
            if start <= time <= end:
                return region
        return OTHER


def _host(
    profile: RankProfile,
    own: list[dict[str, Any]],
    events: list[dict[str, Any]],
    arrows: dict[Any, Any],
    window: Span,
) -> None:
    """A CPU's: the training thread's time, less what it waits for collectives."""
    calls = [e for e in events if e["name"].startswith("gloo:")]
    for event in calls:
        profile.collectives[event["name"]] += event["dur"]
    under_way = union(_span(e) for e in calls)
    profile.communication = length(clipped(under_way, window))
    relevant = [e for e in own if e.get("cat") in ("cpu_op", "user_annotation")]
    thread = _Thread(own[0]["tid"], relevant, _Places(events, arrows))
    profile.calls = thread.calls
    sweep = Sweep(clipped(under_way, window))
    for start, end, place, name in thread.segments:
        start, end = max(start, window[0]), min(end, window[1])
        if end <= start:
            continue
        computes = name is not None and "::" in name and not name.startswith((*_WAITING, _BACKWARD))
        waited = 0.0 if computes else sweep.overlap(start, end)
        profile.exposed += waited
        profile.times[place] += end - start - waited
        if computes and name is not None:
            profile.kernels[name] += end - start


def _device(
    profile: RankProfile,
    events: list[dict[str, Any]],
    kernels: list[dict[str, Any]],
    arrows: dict[Any, Any],
) -> None:
    """A GPU's: kernels, by the instant of their launch."""
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", {})
    }
    by_thread = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            by_thread[event["tid"]].append(event)
    places = _Places(events, arrows)
    threads = {tid: _Thread(tid, found, places) for tid, found in by_thread.items()}
    for thread in threads.values():
        profile.calls += thread.calls
    computing, sending = [], []
    for event in kernels:
        if "nccl" in event["name"].lower():
            sending.append(_span(event))
            profile.collectives[event["name"]] += event["dur"]
            continue
        computing.append(_span(event))
        profile.kernels[event["name"]] += event["dur"]
        profile.times[_launched_at(event, launches, threads)] += event["dur"]
    under_way = union(sending)
    profile.communication = length(under_way)
    sweep = Sweep(union(computing))
    profile.exposed = sum(end - start - sweep.overlap(start, end) for start, end in under_way)


def _launched_at(
    kernel: dict[str, Any], launches: dict[Any, Any], threads: dict[Any, _Thread]
) -> Place:
    launch = launches.get(kernel.get("args", {}).get("correlation"))
    thread = threads.get(launch["tid"]) if launch else None
    segment = thread.at(launch["ts"]) if thread and launch else None
    return segment.place if segment else Place(OTHER, "forward")


def union(spans: Iterable[Span]) -> list[Span]:
    """The same instants as disjoint spans, ascending."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def clipped(spans: Iterable[Span], window: Span) -> list[Span]:
    """What of the spans lies in the window."""
    inside = ((max(start, window[0]), min(end, window[1])) for start, end in spans)
    return [(start, end) for start, end in inside if end > start]


def length(spans: Iterable[Span]) -> float:
    """Of disjoint spans."""
    return sum(end - start for start, end in spans)


class Sweep:
    """Overlaps of ascending questions with disjoint ascending spans, each span passed once."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._first = 0

    def overlap(self, start: float, end: float) -> float:
        """Microseconds of [start, end] within the spans; `start` never less than before."""
        return length(self._within(start, end))

    def _within(self, start: float, end: float) -> Iterator[Span]:
        while self._first < len(self._spans) and self._spans[self._first][1] <= start:
            self._first += 1
        for span in self._spans[self._first :]:
            if span[0] >= end:
                return
            yield max(start, span[0]), min(end, span[1])
