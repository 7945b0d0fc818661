"""Who sends how much to whom in a move between layouts, as a picture."""

from pathlib import Path

import numpy as np

from titan_moe.simulate.reshard import GB, Reshard


def draw(found: Reshard, ranks_per_node: int, path: Path, title: str) -> None:
    """Write a PNG: a row for each sending rank, a column for each receiving one."""
    from matplotlib.figure import Figure

    ranks = len(found.bytes)
    figure = Figure(figsize=(7.5, 6.8), layout="constrained")
    panel = figure.subplots()
    moved = found.bytes / GB
    # What a rank sends nothing to stays white.
    image = panel.imshow(np.where(moved > 0, moved, np.nan), cmap="viridis_r", vmin=0)
    figure.colorbar(image, ax=panel, shrink=0.8, label="GB")
    for edge in range(ranks_per_node, ranks, ranks_per_node):
        panel.axhline(edge - 0.5, color="#888888", linewidth=0.8)
        panel.axvline(edge - 0.5, color="#888888", linewidth=0.8)
    step = max(1, ranks // 16)
    panel.set_xticks(range(0, ranks, step))
    panel.set_yticks(range(0, ranks, step))
    panel.set_xlabel("to rank; lines part nodes")
    panel.set_ylabel("from rank")
    panel.set_title(f"{title}\n{found.source}\n-> {found.target}", loc="left", fontsize=10)
    figure.savefig(path, dpi=130)
