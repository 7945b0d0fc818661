"""The curves of a run as one picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEGEND_LIMIT = 6


def plot_curves(
    metrics_jsonl: Path, png: Path, *, title: str, unit: str, uniform_loss: float
) -> None:
    """Draw loss, validation loss, gradient norm, learning rate, throughput and expert load.

    Args:
        unit: what the loss is per; uniform_loss: that of a uniform guess.

    Raises:
        RunError: the file holds no logged step.
    """
    # Imported here: it costs a second at start. Figure without pyplot needs no display.
    from matplotlib.figure import Figure

    lines = [line for line in read_json_lines(metrics_jsonl) if "step" in line]
    if not lines:
        raise RunError(f"{metrics_jsonl} holds no logged step to draw")
    figure = Figure(figsize=(11, 10), layout="constrained")
    figure.suptitle(title, parse_math=False)
    grid = figure.add_gridspec(3, 2, height_ratios=(1.5, 1, 1))

    axes = figure.add_subplot(grid[0, :])
    axes.set(title=f"loss (nats per {unit})")
    _draw_loss(axes, lines, uniform_loss)
    _draw_grad_norm(figure.add_subplot(grid[1, 0]), lines)
    _draw_lr(figure.add_subplot(grid[1, 1]), lines)
    _draw_throughput(figure.add_subplot(grid[2, 0]), lines)
    _draw_expert_load(figure.add_subplot(grid[2, 1]), lines)

    for axes in figure.axes:
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    with replacing(png) as aside:
        figure.savefig(aside, dpi=120)


def _draw_loss(axes: "Axes", lines: list[dict[str, Any]], uniform_loss: float) -> None:
    steps, losses = _series(lines, "loss")
    axes.plot(steps, losses, linewidth=1, label=_with_last("training", losses))
    steps, held_out = _series(lines, "validation_loss")
    if held_out:
        label = _with_last("held-out documents", held_out)
        axes.plot(steps, held_out, marker="o", markersize=4, label=label)
    # Not where training began below it: the curve would be flat.
    if losses and max(losses) > 0.9 * uniform_loss:
        label = f"uniform guess: {uniform_loss:.2f}"
        axes.axhline(uniform_loss, color="gray", linewidth=1, linestyle=":", label=label)
    if losses:
        axes.legend(frameon=False)


def _with_last(what: str, values: list[float]) -> str:
    return f"{what}: {values[-1]:.2f} at the end" if values else what


def _draw_grad_norm(axes: "Axes", lines: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.plot(*_series(lines, "grad_norm"), linewidth=1)
    axes.set(title="gradient norm, before clipping", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_lr(axes: "Axes", lines: list[dict[str, Any]]) -> None:
    axes.plot(*_series(lines, "lr"), linewidth=1)
    axes.set(title="learning rate")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:g}")


def _draw_throughput(axes: "Axes", lines: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import EngFormatter

    axes.plot(*_series(lines, "tokens_per_second"), linewidth=1)
    axes.set(title="tokens per second")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _draw_expert_load(axes: "Axes", lines: list[dict[str, Any]]) -> None:
    from matplotlib import colormaps

    prefix, suffix = "moe/layers.", "/max_over_mean"
    layers = sorted(
        {
            int(key[len(prefix) : -len(suffix)])
            for line in lines
            for key in line
            if key.startswith(prefix) and key.endswith(suffix)
        }
    )
    if not layers:
        axes.set(title="expert load: no MoE layer")
        return
    colors = colormaps["viridis"].resampled(len(layers) + 1)
    for index, layer in enumerate(layers):
        is_named = len(layers) <= _LEGEND_LIMIT or layer in (layers[0], layers[-1])
        axes.plot(
            *_series(lines, f"{prefix}{layer}{suffix}"),
            linewidth=1,
            color=colors(index),
            label=f"layer {layer}" if is_named else None,
        )
    axes.legend(frameon=False)
    axes.axhline(1, color="gray", linewidth=1, linestyle=":")
    axes.set(title="busiest expert's load over the mean")


def _series(lines: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]
