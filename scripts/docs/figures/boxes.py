"""Which part of a tensor each rank holds: in two orders, along a plan, through a transfer."""

from collections.abc import Mapping, Sequence

import torch

from scripts.docs.figures.svg import Drawing
from titan_moe.distributed.boxes import Box
from titan_moe.distributed.redistribution import plan
from titan_moe.distributed.sharding import Sharding
from titan_moe.distributed.transfer_plan import Held, plan_transfer

_SHAPE = (8, 8)
_SIDE, _LEFT, _TOP = 152, 20, 58
_COLORS = ("one", "two", "three", "four")


def draw_orders() -> str:
    """Both orders of two axes on one dim."""
    axes = {"edp": 2, "ep": 2}
    texts = ("S(0)[edp,ep]", "S(0)[ep,edp]")
    (step,) = plan(*texts, axes=axes, shape=_SHAPE, dtype=torch.float32).steps
    what = "Four ranks hold two rows each of eight; another order gives ranks 1 and 2 each other's"
    return _chain(axes, texts, [(step.op, "one exchange")], what)


def draw_plan() -> str:
    """Every sharding on the way of a plan."""
    axes = {"x": 2, "y": 2}
    found = plan("S(0)[x]S(1)[y]", "S(1)[x,y]", axes=axes, shape=_SHAPE, dtype=torch.float32)
    texts = [str(found.source), *(str(step.after) for step in found.steps)]
    words = [(f"{step.op}", f"over {','.join(step.axes)}") for step in found.steps]
    what = f"The parts of four ranks, from {found.source} to {found.target} in {len(words)} steps"
    return _chain(axes, texts, words, what)


def draw_transfer() -> str:
    """What each rank gets from whom, from four shards of rows to two by two."""
    axes = {"dp_shard": 2, "tp": 2}
    before, after = Sharding.parse("S(0)[dp_shard,tp]"), Sharding.parse("S(0)[dp_shard]S(1)[tp]")
    held, wanted = (
        [{"w": Held(_SHAPE, torch.float32, each.box(r, _SHAPE, axes))} for r in range(4)]
        for each in (before, after)
    )
    ((pieces,),) = plan_transfer(held, wanted).buckets
    drawing = Drawing(
        760,
        _TOP + _SIDE + 44,
        "Four ranks, each with two rows of eight before and a quarter of four by four afterwards: "
        "half of it is kept, and half comes from one other rank",
    )
    for rank in range(4):
        x = _LEFT + rank * (_SIDE + 37)
        drawing.text(x, 32, f"rank {rank}", size=15, bold=True)
        _frame(drawing, x)
        for source, target, box in pieces.of(rank):
            if target == rank:
                says = "kept" if source == rank else f"from {source}"
                _part(drawing, x, box, _COLORS[source], says)
        _outline(drawing, x, held[rank]["w"].box)
    says = "filled: its part afterwards, in the colour of the rank that held it; outlined: before"
    drawing.text(_LEFT, _TOP + _SIDE + 28, says, color="soft")
    return drawing.render()


def _chain(
    axes: Mapping[str, int], texts: Sequence[str], words: Sequence[tuple[str, str]], what: str
) -> str:
    """Shardings from left to right, and what leads from one to the next."""
    gap = 130
    width = 2 * _LEFT + len(texts) * _SIDE + len(words) * gap
    drawing = Drawing(width, _TOP + _SIDE + 24, what)
    for number, text in enumerate(texts):
        x = _LEFT + number * (_SIDE + gap)
        drawing.text(x, 36, text, size=15, bold=True, code=True)
        _frame(drawing, x)
        for rank in range(4):
            box = Sharding.parse(text).box(rank, _SHAPE, axes)
            _part(drawing, x, box, _COLORS[rank], f"rank {rank}")
        if number:
            middle, y = x - gap / 2, _TOP + _SIDE / 2
            drawing.line([(x - gap + 14, y), (x - 14, y)], arrow=True)
            for line, above in zip(words[number - 1], (-10, 22), strict=True):
                drawing.text(middle, y + above, line, anchor="middle", color="soft")
    return drawing.render()


def _frame(drawing: Drawing, x: float) -> None:
    drawing.box(x, _TOP, _SIDE, _SIDE, radius=0)


def _part(drawing: Drawing, x: float, box: Box, color: str, says: str) -> None:
    left, top, width, height = _place(x, box)
    corners = [(left, top), (left + width, top), (left + width, top + height), (left, top + height)]
    drawing.area(corners, color=color)
    drawing.line([*corners, corners[0]], color=color)
    if width < 60:  # Too narrow for a line: the number alone.
        says = says.rpartition(" ")[2]
    drawing.text(left + width / 2, top + height / 2 + 5, says, anchor="middle")


def _outline(drawing: Drawing, x: float, box: Box) -> None:
    left, top, width, height = _place(x, box)
    corners = [(left, top), (left + width, top), (left + width, top + height), (left, top + height)]
    drawing.line([*corners, corners[0]], color="ink", width=2, dash="5 3")


def _place(x: float, box: Box) -> tuple[float, float, float, float]:
    """Left, top, width and height on the page."""
    rows, columns = box
    unit = _SIDE / _SHAPE[0]
    return (
        x + columns.start * unit,
        _TOP + rows.start * unit,
        (columns.stop - columns.start) * unit,
        (rows.stop - rows.start) * unit,
    )
