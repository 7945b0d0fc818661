"""The noise band, with a candidate inside and one outside.

The curves are drawn by lot, not trained: the losses of a falling curve times a random walk. The
band and the verdicts are those of `titan-moe verify losses`.
"""

import math
from random import Random

import numpy as np

from scripts.docs.figures.svg import Drawing, Point
from titan_moe.verify.compare.noise.band import Band, BandCheck
from titan_moe.verify.compare.records import Array, Curve

_STEPS, _CONTROLS = 50, 24
_WALK = 2e-4
"""Of the walk at each step."""
_DRIFT, _DRIFTS_FROM = 8e-4, 15
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 760, 330, 66, 62, 30
_BOTTOM = 232
"""Of the charts."""
_STEPS_ON_AXIS = (1, 10, 20, 30, 40, 50)


def draw() -> str:
    """Two charts of the relative difference from the band's middle; the band is that of Band."""
    band = Band([_curve(f"control {seed}", seed) for seed in range(_CONTROLS)])
    what = "The loss of two trainings, one inside the noise band and one that leaves it"
    drawing = Drawing(_WIDTH, _HEIGHT, what)
    middle = band.location("loss")
    low, high = ((edge - middle) / middle for edge in band.edges("loss"))
    curves = [_curve("right", _CONTROLS), _curve("wrong", _CONTROLS, drift=_DRIFT)]
    lines = [(np.asarray(curve.scalars["loss"]) - middle) / middle for curve in curves]
    top = 1.1 * max(abs(value).max() for value in (low, high, *lines))
    controls = [(band.values(control, "loss") - middle) / middle for control in band.controls]
    width = (_WIDTH - _LEFT - _GAP - 20) / 2
    titles = ("a change that may not matter", "a change that matters")
    for number, (curve, line, title) in enumerate(zip(curves, lines, titles, strict=True)):
        chart = _Chart(drawing, _LEFT + number * (width + _GAP), width, top, len(line))
        chart.frame(labels=number == 0)
        chart.band(low, high)
        for control in controls:
            chart.curve(control, "soft", 0.5)
        check = band.check(curve)
        chart.curve(line, "three" if check.inside else "bad", 2)
        _title(drawing, chart.x, title, check)
    _legend(drawing)
    return drawing.render()


class _Chart:
    """One of the two, from step 1 to the last, from -top to top."""

    def __init__(self, drawing: Drawing, x: float, width: float, top: float, steps: int) -> None:
        self.drawing, self.x, self.width, self.top, self.steps = drawing, x, width, top, steps

    def frame(self, *, labels: bool) -> None:
        height = _BOTTOM - _TOP
        self.drawing.box(self.x, _TOP, self.width, height, fill="card", radius=0)
        for share in (-1, 0, 1):
            value = share * self.top / 1.1
            y = self._y(value)
            self.drawing.line([(self.x, y), (self.x + self.width, y)], color="grid", width=0.8)
            if labels:
                text = f"{100 * value:+.2g} %" if share else "0"
                self.drawing.text(self.x - 7, y + 4, text, size=11.5, color="soft", anchor="end")
        for step in _STEPS_ON_AXIS:
            x = self._x(step - 1)
            self.drawing.text(x, _BOTTOM + 17, str(step), size=11.5, color="soft", anchor="middle")
        middle = self.x + self.width / 2
        self.drawing.text(middle, _BOTTOM + 34, "step", size=11.5, color="soft", anchor="middle")

    def band(self, low: Array, high: Array) -> None:
        upper = self._points(high)
        self.drawing.area([*upper, *reversed(self._points(low))], color="band")

    def curve(self, values: Array, color: str, width: float) -> None:
        self.drawing.line(self._points(values), color=color, width=width)

    def _points(self, values: Array) -> list[Point]:
        return [(self._x(at), self._y(float(value))) for at, value in enumerate(values)]

    def _x(self, at: float) -> float:
        return self.x + self.width * at / (self.steps - 1)

    def _y(self, value: float) -> float:
        return (_TOP + _BOTTOM) / 2 - value / self.top * (_BOTTOM - _TOP) / 2


def _title(drawing: Drawing, x: float, title: str, check: BandCheck) -> None:
    word = "inside" if check.inside else f"outside from step {check.first_outside} on"
    drawing.text(x, 30, title, bold=True)
    says = f"{word}: {check.statistic:.2f} of the limit"
    drawing.text(x, 49, says, color="three" if check.inside else "bad")


def _legend(drawing: Drawing) -> None:
    y = _HEIGHT - 44
    drawing.area(
        [(_LEFT, y - 9), (_LEFT + 26, y - 9), (_LEFT + 26, y + 1), (_LEFT, y + 1)], color="band"
    )
    drawing.text(_LEFT + 34, y, "noise band of the loss", size=12)
    drawing.line([(_LEFT + 200, y - 4), (_LEFT + 226, y - 4)], width=0.8)
    says = f"its {_CONTROLS} control runs: the same training, summed in other orders"
    drawing.text(_LEFT + 234, y, says, size=12)
    words = "Loss relative to the band's middle. The curves are made up; the verdicts are computed."
    drawing.text(_LEFT, y + 24, words, size=12, color="soft")


def _curve(name: str, seed: int, *, drift: float = 0.0) -> Curve:
    """A loss that falls from 5.6 to about 2, off by a random walk, and by a drift in each step."""
    random, off = Random(seed), 0.0
    loss = []
    for step in range(1, _STEPS + 1):
        off += random.gauss(0.0, _WALK) + (drift if step > _DRIFTS_FROM else 0.0)
        loss.append((2 + 3.6 * math.exp(-step / 12)) * math.exp(off))
    return Curve(name, range(1, _STEPS + 1), {"loss": np.array(loss)})
