"""Where a step goes, as a picture: a bar for each rank, a colour for each region."""

from collections.abc import Sequence
from pathlib import Path

from titan_moe.profiling.summary import EXPOSED, IDLE, ORDER, region_time
from titan_moe.profiling.trace import RankProfile

_COLORS = {
    "data": "#8c6d31",
    "embedding": "#c7b299",
    "attention": "#4269d0",
    "route": "#9c6b9e",
    "dispatch": "#6cc5b0",
    "experts": "#3ca951",
    "combine": "#a7d46f",
    "shared_experts": "#97bbf5",
    "feed_forward": "#e7a13d",
    "loss": "#b0507a",
    "grad_norm": "#d9a5c3",
    "optimizer": "#7a4f9a",
    "compiled": "#2f6f8f",
    "fsdp": "#d9c46a",
    "other": "#b5b5b5",
    EXPOSED: "#d62728",
    IDLE: "#ececec",
}
_MOST_BARS = 32
_LABELLED = 0.06
"""Of the longest bar: narrower pieces carry no figure."""


def draw(profiles: Sequence[RankProfile], path: Path, title: str) -> None:
    """Write a PNG; of more than 32 ranks, those at even distances and the slowest."""
    # Imported here: it costs half a second, and the table needs none of it.
    from matplotlib.figure import Figure

    shown = _shown(profiles)
    pieces = {
        name: [_piece(profile, name) for profile in shown] for name in (*ORDER, EXPOSED, IDLE)
    }
    pieces = {name: times for name, times in pieces.items() if any(times)}
    longest = max(sum(times[bar] for times in pieces.values()) for bar in range(len(shown)))
    figure = Figure(figsize=(11, 2.6 + 0.42 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(shown)
    for name, times in pieces.items():
        bars = axes.barh(
            range(len(shown)),
            times,
            left=left,
            height=0.72,
            color=_COLORS.get(name, "#777777"),
            edgecolor="white",
            linewidth=0.6,
            hatch="////" if name == EXPOSED else None,
            label=f"{name}  {sum(times) / len(times):.3g}",
        )
        for bar, time in zip(bars, times, strict=True):
            if time > _LABELLED * longest:
                axes.annotate(
                    f"{time:.3g}",
                    (bar.get_x() + time / 2, bar.get_y() + bar.get_height() / 2),
                    ha="center",
                    va="center",
                    fontsize=8,
                    bbox={"fc": _COLORS[name], "ec": "none", "pad": 1} if name == EXPOSED else None,
                    color="black" if name in (IDLE, "combine", "shared_experts") else "white",
                )
        left = [before + time for before, time in zip(left, times, strict=True)]
    axes.set_yticks(range(len(shown)), [f"rank {profile.rank}" for profile in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.01)
    axes.set_xlabel("milliseconds a step")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        loc="outside lower left",
        ncols=5,
        fontsize=8,
        frameon=False,
        title="mean over the ranks, ms",
    )
    figure.savefig(path, dpi=150)


def _piece(profile: RankProfile, name: str) -> float:
    if name in (EXPOSED, IDLE):
        time = profile.exposed if name == EXPOSED else profile.idle
        return time / 1e3 / profile.num_steps
    return region_time(profile, name)


def _shown(profiles: Sequence[RankProfile]) -> list[RankProfile]:
    if len(profiles) <= _MOST_BARS:
        return list(profiles)
    step = -(-len(profiles) // (_MOST_BARS - 1))
    slowest = max(profiles, key=lambda profile: profile.wall - profile.exposed)
    kept = {profile.rank: profile for profile in (*profiles[::step], slowest)}
    return [kept[rank] for rank in sorted(kept)]
