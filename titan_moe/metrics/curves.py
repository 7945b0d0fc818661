"""The curves of a run as one picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEGEND_LIMIT = 6
_LOAD = "/max_over_mean"


def plot_curves(
    metrics_jsonl: Path, png: Path, *, title: str, unit: str, uniform_loss: float
) -> None:
    """Draw loss, validation loss, gradient norm, learning rate, throughput and expert load.

    Args:
        unit: a target of the loss; uniform_loss: nats per target of a uniform guess.

    Raises:
        RunError: the file holds no logged step.
    """
    # Imported here: it costs a second at start. Figure without pyplot needs no display.
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    lines = [line for line in read_json_lines(metrics_jsonl) if "step" in line]
    if not lines:
        raise RunError(f"{metrics_jsonl} holds no logged step to draw")
    figure = Figure(figsize=(11, 10), layout="constrained")
    figure.suptitle(title, parse_math=False)
    grid = figure.add_gridspec(3, 2, height_ratios=(1.5, 1, 1))

    axes = figure.add_subplot(grid[0, :])
    axes.set(ylabel=f"loss (nats per {unit})")
    _draw_loss(axes, lines, uniform_loss)
    axes = figure.add_subplot(grid[1, 0])
    axes.set(ylabel="gradient norm, before clipping", yscale="log")
    axes.plot(*_series(lines, "grad_norm"), linewidth=1)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    for place, key, what, form in (
        (grid[1, 1], "lr", "learning rate", "{x:g}"),
        (grid[2, 0], "tokens_per_second", "tokens per second", EngFormatter(sep="")),
    ):
        axes = figure.add_subplot(place)
        axes.set(ylabel=what)
        axes.plot(*_series(lines, key), linewidth=1)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(form)
    _draw_expert_load(figure.add_subplot(grid[2, 1]), lines)

    for axes in figure.axes:
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    with replacing(png) as aside:
        figure.savefig(aside, dpi=120)


def _draw_loss(axes: "Axes", lines: list[dict[str, Any]], uniform_loss: float) -> None:
    steps, losses = _series(lines, "loss")
    if not losses:
        return
    axes.plot(steps, losses, linewidth=1, label=f"training: {losses[-1]:.2f} at the end")
    steps, held_out = _series(lines, "validation_loss")
    if held_out:
        label = f"held-out documents: {held_out[-1]:.2f} at the end"
        axes.plot(steps, held_out, marker="o", markersize=4, label=label)
    # Not where training began below it: the curve would be flat.
    if max(losses) > 0.9 * uniform_loss:
        label = f"uniform guess: {uniform_loss:.2f}"
        axes.axhline(uniform_loss, color="gray", linewidth=1, linestyle=":", label=label)
    axes.legend(frameon=False)


def _draw_expert_load(axes: "Axes", lines: list[dict[str, Any]]) -> None:
    from matplotlib import colormaps

    # In the order of the model's layers, as they are logged.
    keys = list(dict.fromkeys(key for line in lines for key in line if key.endswith(_LOAD)))
    axes.set(ylabel="busiest expert over the mean" if keys else "expert load: no MoE layer")
    if not keys:
        return
    colors = colormaps["viridis"].resampled(len(keys) + 1)
    for index, key in enumerate(keys):
        layer = key.removeprefix("moe/").removesuffix(_LOAD)
        is_named = len(keys) <= _LEGEND_LIMIT or key in (keys[0], keys[-1])
        label = layer if is_named else None
        axes.plot(*_series(lines, key), linewidth=1, color=colors(index), label=label)
    axes.axhline(1, color="gray", linewidth=1, linestyle=":")
    axes.legend(frameon=False)


def _series(lines: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]
