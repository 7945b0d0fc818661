"""A token's way through a MoE layer: what is computed while what travels."""

from typing import NamedTuple

from scripts.docs.figures.svg import Drawing


class Stage(NamedTuple):
    """A box of the left column."""

    title: str
    says: str
    file: str
    shape: str = ""


_STAGES = (
    Stage("Router", "a score for each expert", "moe/router.py", "scores_TE"),
    Stage("Route", "the K best experts, and how many tokens each has", "moe/layer.py", "counts_E"),
    Stage("Sort", "which rows go where, by expert", "ops/permute_indices.py"),
    Stage("Gather", "a row for each expert of a token", "ops/move_rows.py", "x_ND"),
    Stage("Shared experts", "every token, while its rows travel", "moe/layer.py", "shared_TD"),
    Stage("Order", "rows expert by expert, padded", "ops/move_rows.py", "x_RD"),
    Stage("Experts", "three grouped GEMMs, times the weight", "moe/experts.py", "y_RD"),
    Stage("Combine", "each token adds its K rows, in a fixed order", "moe/dispatch/", "y_TD"),
)
_LEFT, _WIDTH, _BOX, _STEP, _TOP = 20, 430, 46, 62, 64
_RIGHT, _RIGHT_WIDTH = 520, 220
# What travels: title, words, the stage that starts it, the stage that needs it.
_EXCHANGES = (
    ("counts, all-to-all over ep", "then the host reads the sizes", 1, 3),
    ("rows, all-to-all over ep", "to the ranks of their experts", 3, 5),
    ("rows, all-to-all back", "to the ranks of their tokens", 6, 7),
)


def draw() -> str:
    """Time runs downwards: computing on the left, exchanges on the right."""
    height = _TOP + _STEP * len(_STAGES) + 48
    what = (
        "A token's way through a MoE layer: router, route, sort and gather while counts travel, "
        "shared experts while rows travel, grouped GEMMs, and back to a sum over K rows"
    )
    drawing = Drawing(760, height, what)
    drawing.text(_LEFT, 32, "computes", size=15, bold=True)
    drawing.text(_RIGHT, 32, "travels between ranks", size=15, bold=True)
    drawing.text(_LEFT, 52, "time runs downwards", color="soft")
    for number, stage in enumerate(_STAGES):
        _draw_stage(drawing, stage, _y(number))
        if number:
            x = _LEFT + 24
            drawing.line([(x, _y(number) - _STEP + _BOX), (x, _y(number) - 2)], arrow=True)
    for exchange in _EXCHANGES:
        _draw_exchange(drawing, *exchange)
    y = height - 40
    drawing.text(_LEFT, y, "The backward is the same way in reverse.", color="soft")
    more = "With etp, rows are gathered over it before the experts, and their outputs summed after."
    drawing.text(_LEFT, y + 20, more, color="soft")
    return drawing.render()


def _y(number: int) -> float:
    return _TOP + _STEP * number


def _draw_stage(drawing: Drawing, stage: Stage, y: float) -> None:
    drawing.box(_LEFT, y, _WIDTH, _BOX, edge="one")
    drawing.text(_LEFT + 12, y + 19, stage.title, bold=True)
    drawing.text(_LEFT + 12, y + 37, stage.says, size=12.5)
    right = _LEFT + _WIDTH - 12
    drawing.text(right, y + 19, stage.file, size=11.5, color="soft", anchor="end", code=True)
    drawing.text(right, y + 37, stage.shape, size=11.5, color="one", anchor="end", code=True)


def _draw_exchange(drawing: Drawing, title: str, says: str, first: int, last: int) -> None:
    """A bar beside the stages that run meanwhile."""
    top, bottom = _y(first) + 34, _y(last) + 22
    edge = _LEFT + _WIDTH
    drawing.box(_RIGHT, top, _RIGHT_WIDTH, bottom - top, edge="two")
    middle = (top + bottom) / 2
    drawing.text(_RIGHT + _RIGHT_WIDTH / 2, middle - 4, title, anchor="middle", bold=True)
    drawing.text(_RIGHT + _RIGHT_WIDTH / 2, middle + 14, says, anchor="middle", size=12.5)
    drawing.line([(edge, top + 5), (_RIGHT - 2, top + 5)], color="two", arrow=True)
    drawing.line([(_RIGHT, bottom - 5), (edge + 2, bottom - 5)], color="two", arrow=True)
