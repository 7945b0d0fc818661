"""Where a step's time goes: the traces of all ranks of a profiled step, as numbers and a table."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from titan_moe.profiling.regions import REGIONS
from titan_moe.profiling.timeline import COMPILED, FSDP, OTHER, PHASES, RegionPhase
from titan_moe.profiling.trace import RankProfile, TraceError, read_trace

EXPOSED, IDLE = "exposed communication", "idle"
ORDER = (*REGIONS, COMPILED, FSDP, OTHER)
_RANK_FILE = re.compile(r"rank-(\d+)\.json(\.gz)?")
_MOST_KERNELS = 12
_NAME_WIDTH = 72


def read_profiles(path: Path) -> list[RankProfile]:
    """Of a trace, or of all `rank-R.json.gz` in a folder, by rank. Raises TraceError."""
    if not path.is_dir():
        return [read_trace(path)]
    files = [file for file in path.iterdir() if _RANK_FILE.fullmatch(file.name)]
    if not files:
        steps = sorted(each.name for each in path.glob("step-*"))
        hint = f": name one of its steps, such as {path / steps[-1]}" if steps else ""
        raise TraceError(f"{path}: holds no rank-R.json.gz{hint}")
    profiles = sorted((read_trace(file) for file in files), key=lambda profile: profile.rank)
    if len({profile.rank for profile in profiles}) < len(profiles):
        raise TraceError(f"{path}: two files are of the same rank")
    return profiles


def summary(profiles: Sequence[RankProfile]) -> dict[str, Any]:
    """All figures, in milliseconds per step."""
    regions = {}
    for region in _present(profiles):
        phases = {
            phase: mean(
                _milliseconds(p, p.times.get(RegionPhase(region, phase), 0)) for p in profiles
            )
            for phase in PHASES
        }
        regions[region] = {
            "calls": mean(p.calls[region] / p.num_steps for p in profiles),
            **phases,
            **_over_ranks(profiles, [region_time(p, region) for p in profiles]),
        }
    rest = {
        EXPOSED: _over_ranks(profiles, [_milliseconds(p, p.exposed) for p in profiles]),
        IDLE: _over_ranks(profiles, [_milliseconds(p, p.idle) for p in profiles]),
    }
    communication = [_milliseconds(p, p.communication) for p in profiles]
    return {
        "ranks": [p.rank for p in profiles],
        "steps": profiles[0].num_steps,
        "measured": "GPU kernels" if profiles[0].on_gpu else "CPU thread",
        "step_ms": mean(_milliseconds(p, p.wall) for p in profiles),
        "regions": regions,
        **rest,
        "communication": _over_ranks(profiles, communication),
        "exposed_share_of_communication": _ratio(rest[EXPOSED]["mean"], mean(communication)),
        "collectives": _top(profiles, "collectives"),
        "kernels": _top(profiles, "kernels"),
    }


def region_time(profile: RankProfile, region: str) -> float:
    """Milliseconds per step of all phases."""
    times = (profile.times.get(RegionPhase(region, phase), 0) for phase in PHASES)
    return _milliseconds(profile, sum(times))


def table(facts: dict[str, Any]) -> str:
    """The figures as text."""
    head = ("region", "calls", *PHASES, "sum", "share", "slowest", "spread")
    lines = [
        f"{len(facts['ranks'])} rank(s), {facts['steps']} step(s): {facts['step_ms']:,.1f} ms a "
        f"step, time of the {facts['measured']}",
        "",
        _row(head),
    ]
    for region, row in facts["regions"].items():
        phases = [f"{row[phase]:.1f}" for phase in PHASES]
        lines.append(_row((region, f"{row['calls']:g}", *phases, *_shares(row))))
    for name in (EXPOSED, IDLE):
        lines.append(_row((name, "", "", "", "", *_shares(facts[name]))))
    sent, exposed = facts["communication"]["mean"], facts[EXPOSED]["mean"]
    lines += [
        "",
        f"communication {sent:.1f} ms a step, exposed {exposed:.1f} "
        f"({facts['exposed_share_of_communication']:.0%} of it, "
        f"{facts[EXPOSED]['share']:.0%} of the step)",
    ]
    for what in ("collectives", "kernels"):
        lines += ["", f"{what}, ms a step and rank"]
        lines += [f"{ms:10.2f}  {_short(name)}" for name, ms in facts[what].items()]
    lines += ["", "ms; mean of the ranks; spread: slowest rank over the fastest"]
    return "\n".join(lines)


def _present(profiles: Sequence[RankProfile]) -> list[str]:
    found = {place[0] for profile in profiles for place in profile.times}
    return [*(r for r in ORDER if r in found), *sorted(found - set(ORDER))]


def _over_ranks(profiles: Sequence[RankProfile], times: Sequence[float]) -> dict[str, Any]:
    slowest = max(range(len(times)), key=lambda place: times[place])
    walls = mean(_milliseconds(p, p.wall) for p in profiles)
    return {
        "mean": mean(times),
        "share": _ratio(mean(times), walls),
        "slowest_rank": profiles[slowest].rank,
        "slowest": times[slowest],
        "fastest": min(times),
        "by_rank": list(times),
    }


def _top(profiles: Sequence[RankProfile], what: str) -> dict[str, float]:
    names = {name for profile in profiles for name in getattr(profile, what)}
    times = {
        name: mean(_milliseconds(p, getattr(p, what).get(name, 0)) for p in profiles)
        for name in names
    }
    return dict(sorted(times.items(), key=lambda item: -item[1])[:_MOST_KERNELS])


def _shares(row: dict[str, Any]) -> tuple[str, ...]:
    spread = _ratio(row["slowest"], row["fastest"])
    alone = len(row["by_rank"]) == 1
    return (
        f"{row['mean']:.1f}",
        f"{row['share']:.1%}",
        "" if alone else f"rank {row['slowest_rank']}",
        "" if alone or not row["fastest"] else f"{spread:.2f}",
    )


def _row(cells: Sequence[str]) -> str:
    first, *others = cells
    return f"{first:<22}" + "".join(f"{cell:>11}" for cell in others)


def _short(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 3] + "..."


def _milliseconds(profile: RankProfile, microseconds: float) -> float:
    return microseconds / 1e3 / profile.num_steps


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0
