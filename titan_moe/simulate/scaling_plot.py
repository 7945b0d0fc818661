"""Curves of what a rank sends, makes and holds over the size of the world."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_moe.simulate.scaling import RankFacts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#4269d0", "#3ca951", "#e7a13d", "#d62728", "#9c6b9e", "#6cc5b0", "#b0507a", "#7a4f9a")


def draw(curve: Sequence[RankFacts], path: Path, title: str) -> None:
    """Write a PNG of four panels over the number of ranks, all axes logarithmic."""
    from matplotlib.figure import Figure

    curve = sorted(curve, key=lambda facts: facts.world_size)
    worlds = [facts.world_size for facts in curve]
    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    (sent, held), (made, host) = figure.subplots(2, 2)
    axes_names = sorted({axis for facts in curve for axis in facts.traffic})
    _lines(
        sent,
        worlds,
        {f"over {a}": [f.bytes_by_axis().get(a, 0) / 1e6 for f in curve] for a in axes_names},
    )
    sent.set_title("sent in a step", loc="left", fontsize=10)
    sent.set_ylabel("MB that leave a rank")
    shards = {
        "own weights": [facts.parameter_bytes / 1e6 for facts in curve],
        "own optimizer state": [facts.optimizer_bytes / 1e6 for facts in curve],
    }
    _lines(held, worlds, shards)
    ideal = [shards["own weights"][0] * worlds[0] / world for world in worlds]
    held.plot(worlds, ideal, ":", color="#888888", label="own weights, if all were cut by all")
    held.set_title("the shard that a rank owns", loc="left", fontsize=10)
    held.set_ylabel("MB")
    _lines(
        made,
        worlds,
        {
            "process groups of a rank": [facts.num_groups for facts in curve],
            "calls that make groups": [facts.new_group_calls for facts in curve],
            "CPU seconds to make groups and meshes": [facts.mesh_seconds for facts in curve],
            "CPU seconds to lay out the model": [facts.layout_seconds for facts in curve],
        },
    )
    made.set_title("start-up", loc="left", fontsize=10)
    made.set_ylabel("number; seconds")
    _lines(
        host,
        worlds,
        {
            "process with the model laid out, no weights": [f.rss_built / 1e6 for f in curve],
            "of it: import torch and titan_moe": [f.rss_import / 1e6 for f in curve],
            "groups and meshes": [f.metadata_bytes / 1e6 for f in curve],
        },
    )
    kept = [facts.metadata_bytes for facts in curve]
    each = (kept[-1] - kept[0]) / max(worlds[-1] - worlds[0], 1)
    title = f"host memory: {each:.0f} bytes of groups and meshes for each further rank"
    host.set_title(title, loc="left", fontsize=10)
    host.set_ylabel("MB")
    for panel in (sent, held, made, host):
        # Below, where no line runs.
        panel.legend(
            fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2
        )
    figure.savefig(path, dpi=130)


def _lines(panel: "Axes", worlds: Sequence[int], series: dict[str, list[float]]) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator

    for color, (label, values) in zip(_COLORS * 2, series.items(), strict=False):
        known = [(w, v) for w, v in zip(worlds, values, strict=True) if v > 0]
        if known:
            panel.plot(*zip(*known, strict=True), "o-", color=color, label=label, markersize=4)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(worlds, [f"{world:,}" for world in worlds], fontsize=8)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("ranks", fontsize=9)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
