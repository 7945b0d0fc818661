"""The two views of a world: which ranks stand together, axis inside axis."""

from dataclasses import asdict

from scripts.docs.figures.svg import Drawing
from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.verify.report.sections import VIEWS, MeshNode, mesh_view

_DIMS = ParallelDims(world_size=16, pp=2, dp_shard=2, cp=2, tp=2, ep=4)
_CELL, _GAP, _HEAD, _PAD = 30, 5, 17, 7
_WIDTH = 760
_COLORS = {"dense": "one", "sparse": "two"}


def draw() -> str:
    """Dense above, sparse below, of 16 ranks."""
    views = [mesh_view(name, asdict(_DIMS)) for name in VIEWS]
    height = 20 + sum(_size(view["node"])[1] + 78 for view in views)
    what = "16 ranks as nested boxes, once by the dense axes and once by the sparse ones"
    drawing = Drawing(_WIDTH, int(height), what)
    y = 32.0
    for view in views:
        drawing.text(20, y, f"{view['name']} view: {view['words']}", size=15, bold=True)
        drawing.text(20, y + 20, f"holds {view['modules']}", color="soft")
        width, height = _size(view["node"])
        _draw(drawing, view["node"], (_WIDTH - width) / 2, y + 32, _COLORS[view["name"]])
        y += height + 78
    return drawing.render()


def _size(node: MeshNode) -> tuple[float, float]:
    """Width and height of what is drawn of a node, without a box around it."""
    if node.direction == "row":
        return _label(node.axis) + len(node.inner) * (_CELL + _GAP), _CELL
    sizes = [_boxed(inner) for inner in node.inner]
    widths, heights = zip(*sizes, strict=True)
    if node.direction == "down":
        return max(widths), sum(heights) + _GAP * (len(sizes) - 1)
    return sum(widths) + _GAP * (len(sizes) - 1), max(heights)


def _boxed(node: MeshNode) -> tuple[float, float]:
    width, height = _size(node)
    return width + 2 * _PAD, height + _HEAD + 2 * _PAD


def _label(axis: str) -> float:
    return 8.0 * len(axis) + 6


def _draw(drawing: Drawing, node: MeshNode, x: float, y: float, color: str) -> None:
    if node.direction == "row":
        drawing.text(x, y + 20, node.axis, size=12, color="soft")
        x += _label(node.axis)
        for inner in node.inner:
            drawing.box(x, y, _CELL, _CELL, fill="card", edge=color, radius=4)
            drawing.text(x + _CELL / 2, y + 20, str(inner.rank), anchor="middle")
            x += _CELL + _GAP
        return
    for number, inner in enumerate(node.inner):
        width, height = _boxed(inner)
        drawing.box(x, y, width, height)
        drawing.text(x + _PAD, y + 17, f"{node.axis} {number}", size=12, color="soft")
        _draw(drawing, inner, x + _PAD, y + _HEAD + _PAD, color)
        if node.direction == "down":
            y += height + _GAP
        else:
            x += width + _GAP
