"""The time of a profiled step by region and phase, from the torch.profiler traces of its ranks.

Forward: an instant belongs to the innermost region around it (runtime/regions.py). Backward: to
the region that made the autograd node which runs, by the trace's links from forward operations
to backward ones. A region that runs inside the backward is a recomputation. FSDP names its own
work, and so does torch.compile: a compiled layer is one region.

On a CPU the time is that of the thread that trains; a rank communicates while gloo's threads run a
collective. On a GPU it is that of kernels, each belonging to the instant that launched it; a rank
communicates while NCCL's kernels run. Communication is exposed while nothing is computed.
"""

import gzip
import json
import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from titan_moe.config.errors import ConfigError
from titan_moe.planner.step_time import REGIONS as PARTS
from titan_moe.profiling.parts import beside, part_of
from titan_moe.runtime.errors import reason
from titan_moe.runtime.regions import PREFIX, REGIONS

PHASES = ("forward", "recompute", "backward")
EXPOSED, IDLE = "exposed communication", "idle"
_COMPILED, _FSDP, _OTHER = "compiled", "fsdp", "other"
_COMPILED_EVENT = "Torch-Compiled Region"
_BACKWARD = "autograd::engine::evaluate_function"
_WAITING = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", _BACKWARD)
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_RANK_FILE = re.compile(r"rank-(\d+)\.json(\.gz)?")
_MOST_NAMES = 12

Event = dict[str, Any]
Span = tuple[float, float]
"""Start and end in microseconds."""


class RegionPhase(NamedTuple):
    """The region and the phase that an instant belongs to."""

    region: str
    phase: str


class Segment(NamedTuple):
    """A stretch of a thread's time with one innermost event."""

    start: float
    end: float
    place: RegionPhase
    operation: str | None
    """The innermost operation's name; None between operations."""


@dataclass
class RankProfile:
    """The times of one trace, in microseconds of all its steps."""

    rank: int
    on_gpu: bool
    num_steps: int
    wall: float
    """Time from the first recorded step's begin to the last one's end."""
    times: dict[RegionPhase, float] = field(default_factory=lambda: defaultdict(float))
    communication: float = 0.0
    """Time in which a collective runs."""
    exposed: float = 0.0
    """Time in which a collective runs and nothing is computed."""
    collectives: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    kernels: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Kernels on a GPU, an operation's own time on a CPU, by name; no collectives."""
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of a GPU: kernels, exposed collectives and idle time by the planner's regions. Collectives
    that are exposed together count each."""

    @property
    def idle(self) -> float:
        """Time of neither computing nor communicating."""
        return max(0.0, self.wall - sum(self.times.values()) - self.exposed)


def read_profiles(path: Path) -> list[RankProfile]:
    """Read a trace, or all `rank-R.json.gz` in a folder, by rank. Raises ConfigError."""
    if not path.is_dir():
        return [read_trace(path)]
    files = [file for file in path.iterdir() if _RANK_FILE.fullmatch(file.name)]
    if not files:
        steps = sorted(each.name for each in path.glob("step-*"))
        hint = f": name one of its steps, such as {path / steps[-1]}" if steps else ""
        raise ConfigError(f"{path}: holds no rank-R.json.gz{hint}")
    return sorted((read_trace(file) for file in files), key=lambda profile: profile.rank)


def read_trace(path: Path) -> RankProfile:
    """Read `rank-R.json.gz` or `.json`. Raises ConfigError."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        line = f"{path}: cannot be read as a trace of torch.profiler"
        raise ConfigError(f"{line}: {reason(error)}") from None
    annotations = [e for e in events if e.get("cat") == "user_annotation"]
    regions = Counter(e["tid"] for e in annotations if e["name"].startswith(PREFIX))
    if not regions:
        raise ConfigError(
            f"{path}: names none of titan_moe's regions: profile a run of it, with "
            f"--profiling.enable_profiling"
        )
    main = regions.most_common(1)[0][0]
    steps = [_span(e) for e in annotations if e["name"].startswith("ProfilerStep#")]
    spans = steps or [_span(e) for e in events if e["tid"] == main]
    window = min(start for start, _ in spans), max(end for _, end in spans)
    kernels = [e for e in events if e.get("cat") in _ON_DEVICE]
    rank = (trace.get("distributedInfo") or {}).get("rank", 0)
    profile = RankProfile(rank, bool(kernels), max(1, len(steps)), window[1] - window[0])
    threads = _Threads(events, trace["traceEvents"], main)
    if kernels:
        _measure_gpu(profile, events, kernels, threads)
    else:
        _measure_cpu(profile, events, threads.segments[main], window)
    return profile


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


class _Threads:
    """The segments of every thread, of which a backward looks up those of its forward."""

    def __init__(self, events: list[Event], arrows: list[Event], main: Any) -> None:
        arrows = [e for e in arrows if e.get("cat") == "fwdbwd"]
        starts = {e["id"]: (e["tid"], e["ts"]) for e in arrows if e.get("ph") == "s"}
        ends = ((e, starts.get(e["id"])) for e in arrows if e.get("ph") == "f")
        self._forward_of = {(e["tid"], e["ts"]): made_at for e, made_at in ends if made_at}
        by_thread: dict[Any, list[Event]] = {main: []}  # First: it has the forward.
        for event in events:
            if event.get("cat") in ("cpu_op", "user_annotation"):
                by_thread.setdefault(event["tid"], []).append(event)
        self.segments: dict[Any, list[Segment]] = {}
        for thread, own in by_thread.items():
            self.segments[thread] = []
            for segment in _segments(own, self._place_of):
                self.segments[thread].append(segment)

    def place_at(self, thread: Any, time: float) -> RegionPhase:
        """Returns the region and phase in which a thread was at an instant."""
        segments = self.segments.get(thread, [])
        index = bisect_right(segments, time, key=lambda each: each.start) - 1
        if index < 0 or time > segments[index].end:
            return RegionPhase(_OTHER, "forward")
        return segments[index].place

    def _place_of(self, event: Event, around: RegionPhase) -> RegionPhase:
        """Returns the place of an event, from that around it."""
        name, phase = event["name"], around.phase
        inside = "recompute" if phase == "backward" else phase
        if name.startswith(PREFIX) and event.get("cat") == "user_annotation":
            return RegionPhase(name.removeprefix(PREFIX), inside)
        if name.startswith(_COMPILED_EVENT):
            return RegionPhase(_COMPILED, inside)
        if name.startswith("FSDP::"):
            return RegionPhase(_FSDP, phase)
        if name.startswith(_BACKWARD):
            return RegionPhase(_OTHER, "backward")
        made_at = self._forward_of.get((event["tid"], event["ts"]))
        if made_at is not None and phase == "backward":
            return RegionPhase(self.place_at(*made_at).region, "backward")
        return around


def _segments(
    events: list[Event], place_of: Callable[[Event, RegionPhase], RegionPhase]
) -> Iterator[Segment]:
    """Yields a thread's time from its first event on, cut by its nested events."""
    # If events begin together, the longer one is around the other.
    ordered = sorted(events, key=lambda e: (e["ts"], -e["dur"]))
    last: Event = {"ts": max(_span(event)[1] for event in events), "dur": 0.0, "name": ""}
    stack: list[tuple[float, RegionPhase, str | None]]
    stack = [(math.inf, RegionPhase(_OTHER, "forward"), None)]
    now = ordered[0]["ts"]
    for event in [*ordered, last]:
        while True:
            end, place, name = stack[-1]
            until = min(end, event["ts"])
            if until > now:
                yield Segment(now, until, place, name)
                now = until
            if end > event["ts"]:
                break
            stack.pop()
        if event is last:
            break
        # An event that outlives its parent by rounding ends with it.
        own_name = event["name"] if event.get("cat") == "cpu_op" else name
        stack.append((min(_span(event)[1], end), place_of(event, place), own_name))


def _measure_cpu(
    profile: RankProfile, events: list[Event], segments: list[Segment], window: Span
) -> None:
    """Add up the training thread's time, less what it waits for collectives."""
    calls = [e for e in events if e["name"].startswith("gloo:")]
    for event in calls:
        profile.collectives[event["name"]] += event["dur"]
    communicating = _time_covered(map(_span, calls))
    profile.communication = communicating(*window)
    for start, end, place, name in segments:
        start, end = max(start, window[0]), min(end, window[1])
        if end <= start:
            continue
        computes = name is not None and "::" in name and not name.startswith(_WAITING)
        waited = 0.0 if computes else communicating(start, end)
        profile.exposed += waited
        profile.times[place] += end - start - waited
        if computes and name is not None:
            profile.kernels[name] += end - start


def _measure_gpu(
    profile: RankProfile, events: list[Event], kernels: list[Event], threads: _Threads
) -> None:
    """Add up the time of kernels, by the instants that launched them."""
    launches = {
        e["args"]["correlation"]: (e["tid"], e["ts"])
        for e in events
        if e.get("cat") in _LAUNCHES and "correlation" in e.get("args", {})
    }
    sending = [e for e in kernels if "nccl" in e["name"].lower()]
    computing = [e for e in kernels if "nccl" not in e["name"].lower()]
    running, sent, computed = (
        _time_covered(map(_span, events)) for events in (kernels, sending, computing)
    )
    always = -math.inf, math.inf
    profile.communication, profile.exposed = sent(*always), running(*always) - computed(*always)
    for event in kernels:
        name, args, lasts = event["name"], event.get("args", {}), event["dur"]
        place = threads.place_at(*launches.get(args.get("correlation"), (None, 0.0)))
        if "nccl" in name.lower():
            profile.collectives[name] += lasts
            lasts -= computed(*_span(event))
        else:
            profile.kernels[name] += lasts
            profile.times[place] += lasts
        axes = args.get("Process Group Description", "")
        profile.parts[part_of(name, axes, place.region)] += lasts
    profile.parts["host"] = profile.idle


def _time_covered(spans: Iterable[Span]) -> Callable[[float, float], float]:
    """Returns the function that tells how much of the time between two instants lies in any of the
    spans."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    edges = np.ravel(merged or [(0.0, 0.0)])
    covered = np.cumsum(edges[1::2] - edges[::2])
    before = [0.0, *np.repeat(covered, 2)[:-1]]
    return lambda start, end: float(np.diff(np.interp([start, end], edges, before))[0])


def summary(profiles: Sequence[RankProfile]) -> dict[str, Any]:
    """Returns all figures, in milliseconds per step; means of the ranks but for `by_rank`."""

    def over_ranks(microseconds: Iterable[float]) -> dict[str, Any]:
        pairs = zip(microseconds, profiles, strict=True)
        times = [time / 1e3 / p.num_steps for time, p in pairs]
        slowest = profiles[times.index(max(times))].rank
        share = mean(times) / wall if wall else 0.0
        return {"mean": mean(times), "share": share, "slowest_rank": slowest, "by_rank": times}

    def top(by_name: Sequence[dict[str, float]]) -> dict[str, float]:
        names = {name for times in by_name for name in times}
        means = {name: over_ranks(t.get(name, 0) for t in by_name)["mean"] for name in names}
        return dict(sorted(means.items(), key=lambda item: -item[1])[:_MOST_NAMES])

    wall = mean(p.wall / 1e3 / p.num_steps for p in profiles)
    order = (*REGIONS, _COMPILED, _FSDP, _OTHER)
    present = {place.region for p in profiles for place in p.times}
    regions = {}
    for name in sorted(present, key=lambda n: (order.index(n) if n in order else len(order), n)):
        places = [RegionPhase(name, phase) for phase in PHASES]
        by_phase = [over_ranks(p.times.get(at, 0) for p in profiles)["mean"] for at in places]
        whole = over_ranks(sum(p.times.get(at, 0) for at in places) for p in profiles)
        regions[name] = dict(zip(PHASES, by_phase, strict=True)) | whole
    return {
        "ranks": [p.rank for p in profiles],
        "steps": profiles[0].num_steps,
        "measured": "GPU kernels" if profiles[0].on_gpu else "CPU thread",
        "step_ms": wall,
        "regions": regions,
        EXPOSED: over_ranks(p.exposed for p in profiles),
        IDLE: over_ranks(p.idle for p in profiles),
        "communication": over_ranks(p.communication for p in profiles),
        "measured_parts": {
            part: over_ranks(p.parts.get(part, 0) for p in profiles)["mean"] for part in PARTS
        },
        "collectives": top([p.collectives for p in profiles]),
        "kernels": top([p.kernels for p in profiles]),
    }


def table(facts: dict[str, Any]) -> str:
    """Returns the figures as text."""
    row = "{:<22}" + "{:>11}" * 6
    lines = [
        f"{len(facts['ranks'])} rank(s), {facts['steps']} step(s): {facts['step_ms']:,.1f} ms a "
        f"step, time of the {facts['measured']}",
        "",
        row.format("region", *PHASES, "sum", "share", "slowest"),
    ]
    rows = facts["regions"] | {name: facts[name] for name in (EXPOSED, IDLE)}
    for name, of_row in rows.items():
        parts = [f"{of_row[key]:.1f}" if key in of_row else "" for key in PHASES]
        sums = f"{of_row['mean']:.1f}", f"{of_row['share']:.1%}", f"rank {of_row['slowest_rank']}"
        lines.append(row.format(name, *parts, *sums))
    sent, exposed = facts["communication"]["mean"], facts[EXPOSED]["mean"]
    lines += ["", f"communication {sent:.1f} ms a step, exposed {exposed:.1f}"]
    for what in ("collectives", "kernels"):
        lines += ["", f"{what}, ms a step and rank"]
        lines += [f"{ms:10.2f}  {name[:72]}" for name, ms in facts[what].items()]
    return "\n".join([*lines, "", *beside(facts), "ms, mean of the ranks"])
