"""Seconds of a microbatch by arithmetic: a bar for each row, before and now."""

from scripts.docs.figures.svg import Drawing
from scripts.docs.seconds import SHOWN, counts
from scripts.rehearsal.seconds import Microbatch, total

_WIDTH, _LEFT, _TOP, _LINE = 760, 300, 74, 34
_COLORS = {"before": "eight", "now": "one"}
_LEAST = 0.0005
"""Seconds that get a bar."""


def draw() -> str:
    """Rows from top to bottom, as in the table; those that are nothing are left out."""
    made = {when: Microbatch(found).rows() for when, found in counts(SHOWN).items()}
    rows = [
        each for each in zip(*made.values(), strict=True) if max(r.seconds for r in each) > _LEAST
    ]
    sums = {when: total(rows_) for when, rows_ in made.items()}
    what = "Seconds of a microbatch by row: " + ", ".join(
        f"{seconds:.2f} in all {when}" for when, seconds in sums.items()
    )
    drawing = Drawing(_WIDTH, _TOP + _LINE * len(rows) + 20, what)
    title = "Qwen3 30B-A3B on 64 H100: seconds of a microbatch, by arithmetic"
    drawing.text(24, 30, title, size=15, bold=True)
    for number, (when, seconds) in enumerate(sums.items()):
        x = 24 + 190 * number
        drawing.box(x, 43, 14, 14, fill=_COLORS[when], edge=_COLORS[when], radius=2)
        drawing.text(x + 21, 55, f"{when}: {seconds:.2f} s", size=12.5)
    longest = max(row.seconds for each in rows for row in each)
    scale = (_WIDTH - _LEFT - 70) / longest
    height = (_LINE - 8) / len(made)
    for line, each in enumerate(rows):
        y = _TOP + _LINE * line
        drawing.text(_LEFT - 10, y + _LINE / 2, each[0].name, size=12, anchor="end")
        for number, (when, row) in enumerate(zip(made, each, strict=True)):
            width = max(scale * row.seconds, 1)
            at, color = y + 2 + number * height, _COLORS[when]
            drawing.box(_LEFT, at, width, height - 1, fill=color, edge=color, radius=2)
            drawing.text(_LEFT + width + 6, at + height - 2.5, f"{row.seconds:.3f}", size=11)
    return drawing.render()
