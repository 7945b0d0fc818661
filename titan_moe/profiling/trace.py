"""The time of one rank's torch.profiler trace, by region and phase.

Forward: an instant belongs to the innermost region around it (profiling/regions.py). Backward: to
the region that made the autograd node which runs, by the trace's links from forward operations
to backward ones. A region that runs inside the backward is a recomputation. FSDP names its own
work, and so does torch.compile: a compiled layer is one region.

On a CPU the time is that of the thread that trains; a rank communicates while gloo's threads run a
collective. On a GPU it is that of kernels, each belonging to the instant that launched it; a rank
communicates while NCCL's kernels run. Communication is exposed while nothing is computed.
"""

import gzip
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_moe.profiling.regions import PREFIX
from titan_moe.profiling.spans import Overlap, Span, clipped, length, union
from titan_moe.profiling.timeline import (
    BACKWARD,
    OTHER,
    Event,
    Instant,
    RegionPhase,
    Regions,
    Thread,
    span_of,
)
from titan_moe.runtime.files import parse_json

_WAITING = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


class TraceError(Exception):
    """One line for the user: what is wrong with a file."""


@dataclass
class RankProfile:
    """What one trace says, in microseconds."""

    rank: int
    on_gpu: bool
    num_steps: int
    wall: float
    """From the first recorded step's begin to the last one's end."""
    times: dict[RegionPhase, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    """How often each region began in a forward pass."""
    communication: float = 0.0
    """Time in which a collective runs."""
    exposed: float = 0.0
    """The part of it in which nothing is computed."""
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
    steps = [span_of(e) for e in annotations if e["name"].startswith("ProfilerStep#")]
    own = [span_of(e) for e in events if e["tid"] == main]
    window = _hull(steps or own)
    forward_of = _forward_of(trace["traceEvents"])
    kernels = [e for e in events if e.get("cat") in _ON_DEVICE]
    profile = RankProfile(rank, bool(kernels), max(1, len(steps)), window[1] - window[0])
    if kernels:
        _measure_gpu(profile, events, kernels, forward_of)
    else:
        _measure_cpu(profile, [e for e in events if e["tid"] == main], events, forward_of, window)
    return profile


def _load(path: Path) -> dict[str, Any]:
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            trace = parse_json(file.read())
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except (OSError, EOFError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read as a trace: {error}") from None
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise TraceError(f"{path}: is no trace of torch.profiler")
    return trace


def _hull(spans: Sequence[Span]) -> Span:
    return min(start for start, _ in spans), max(end for _, end in spans)


def _forward_of(events: Iterable[Event]) -> dict[Instant, Instant]:
    """(thread, time) where a backward operation begins -> where its forward one did."""
    starts, found = {}, {}
    for event in events:
        if event.get("cat") == "fwdbwd" and event.get("ph") == "s":
            starts[event["id"]] = event["tid"], event["ts"]
    for event in events:
        if event.get("cat") == "fwdbwd" and event.get("ph") == "f" and event["id"] in starts:
            found[event["tid"], event["ts"]] = starts[event["id"]]
    return found


def _measure_cpu(
    profile: RankProfile,
    own: list[Event],
    events: list[Event],
    forward_of: dict[Instant, Instant],
    window: Span,
) -> None:
    """The training thread's time, less what it waits for collectives."""
    calls = [e for e in events if e["name"].startswith("gloo:")]
    for event in calls:
        profile.collectives[event["name"]] += event["dur"]
    communicating = union(span_of(e) for e in calls)
    profile.communication = length(clipped(communicating, window))
    relevant = [e for e in own if e.get("cat") in ("cpu_op", "user_annotation")]
    thread = Thread(own[0]["tid"], relevant, Regions(events, forward_of))
    profile.calls = thread.calls
    covered = Overlap(clipped(communicating, window))
    for start, end, place, name in thread.segments:
        start, end = max(start, window[0]), min(end, window[1])
        if end <= start:
            continue
        computes = name is not None and "::" in name and not name.startswith((*_WAITING, BACKWARD))
        waited = 0.0 if computes else covered.of(start, end)
        profile.exposed += waited
        profile.times[place] += end - start - waited
        if computes and name is not None:
            profile.kernels[name] += end - start


def _measure_gpu(
    profile: RankProfile,
    events: list[Event],
    kernels: list[Event],
    forward_of: dict[Instant, Instant],
) -> None:
    """The time of kernels, by the instants that launched them."""
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", {})
    }
    by_thread = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            by_thread[event["tid"]].append(event)
    regions = Regions(events, forward_of)
    threads = {tid: Thread(tid, found, regions) for tid, found in by_thread.items()}
    for thread in threads.values():
        profile.calls += thread.calls
    computing, sending = [], []
    for event in kernels:
        if "nccl" in event["name"].lower():
            sending.append(span_of(event))
            profile.collectives[event["name"]] += event["dur"]
            continue
        computing.append(span_of(event))
        profile.kernels[event["name"]] += event["dur"]
        profile.times[_place_of(event, launches, threads)] += event["dur"]
    communicating = union(sending)
    profile.communication = length(communicating)
    covered = Overlap(union(computing))
    profile.exposed = sum(end - start - covered.of(start, end) for start, end in communicating)


def _place_of(kernel: Event, launches: dict[Any, Any], threads: dict[Any, Thread]) -> RegionPhase:
    launch = launches.get(kernel.get("args", {}).get("correlation"))
    thread = threads.get(launch["tid"]) if launch else None
    segment = thread.at(launch["ts"]) if thread and launch else None
    return segment.place if segment else RegionPhase(OTHER, "forward")
