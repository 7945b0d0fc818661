"""Counts the trainings of comparisons before the first one, and estimates how long they take."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_moe.runtime.device import peak_flops
from titan_moe.runtime.gpus import GPUS
from titan_moe.verify.compare.goldens import this_device
from titan_moe.verify.compare.launch import Place

MFU = 0.3
"""Assumed share of a GPU's bfloat16 peak, until a training has been measured."""


@dataclass(frozen=True)
class Training:
    """A training that a comparison may need, finished or not."""

    place: Place
    steps: int
    flops: float
    """Matrix products of all steps, forward and backward, without recomputation."""

    @property
    def ranks(self) -> int:
        return self.place.spec.world_size


class Forecast:
    """Trainings of some comparisons. One that several need counts for the first of them.

    Args:
        for_h100: assume H100s where this machine has no GPU.
    """

    def __init__(self, *, for_h100: bool = False) -> None:
        self._here = peak_flops(this_device())
        self._gpu = "this GPU's" if self._here else "an H100's"
        self._peak = self._here or (GPUS["H100"].flops if for_h100 else None)
        self._todo: list[tuple[str, list[Training]]] = []
        self._seen: set[Path] = set()
        self._measured: list[tuple[Training, float]] = []
        """Finished trainings and their seconds, start-up included."""
        self._begun = 0

    def add(self, name: str, trainings: Iterable[Training]) -> None:
        """Add a comparison."""
        new = {each.place.folder: each for each in trainings if each.place.folder not in self._seen}
        self._seen |= new.keys()
        pairs = [(each, each.place.seconds) for each in new.values()]
        self._measured += [(each, seconds) for each, seconds in pairs if seconds is not None]
        self._todo.append((name, [each for each, seconds in pairs if seconds is None]))

    @contextmanager
    def training(self, place: Place) -> Iterator[str]:
        """Measures a training. Yields its number, and the time that it and the rest may take; "" if
        it is not counted."""
        todo, started = self._all, time.perf_counter()
        left = self._time(todo[self._begun :])
        left = f" ({left} to go at most)" if left else ""
        counted = [each for each in todo if each.place.folder == place.folder]
        self._begun += len(counted)
        yield f"training {self._begun} of at most {len(todo)}{left}, " if counted else ""
        self._measured += [(each, time.perf_counter() - started) for each in counted]

    def line(self) -> str:
        """Returns the number of trainings, an estimate of their time, and what it rests on."""
        controls, found = _num_controls(self._all), len(self._measured)
        line = f"at most {len(self._all)} trainings, {controls} of them control runs"
        basis = f"if they reach {MFU:.0%} of {self._gpu} peak, start-up aside"
        if found:
            line, basis = f"{line}; {found} more are found", "at the pace of those"
        estimate = self._time(self._all)
        return f"{line}; at most {estimate} {basis}" if estimate else line

    def rows(self) -> list[dict[str, Any]]:
        """Returns the trainings that each comparison adds."""
        return [
            {
                "comparison": name,
                "trainings": len(todo),
                "control runs": _num_controls(todo),
                "ranks": " ".join(map(str, sorted({each.ranks for each in todo}))),
                "steps": " ".join(map(str, sorted({each.steps for each in todo}))),
                "estimate": self._time(todo),
            }
            for name, todo in self._todo
        ]

    def table(self) -> list[str]:
        """Returns `rows` as aligned lines, and `line`."""
        cells = [list(self.rows()[0]), *(list(map(str, row.values())) for row in self.rows())]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return [*("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells), self.line()]

    @property
    def _all(self) -> list[Training]:
        return [each for _, todo in self._todo for each in todo]

    def _time(self, trainings: Sequence[Training]) -> str:
        """Returns hours, and GPU hours on GPUs; "" where nothing says how fast trainings are."""
        flops, peak = sum(each.flops for each, _ in self._measured), self._peak
        spent = sum(each.ranks * seconds for each, seconds in self._measured)
        if not flops:
            flops, spent = (1.0, 0.0) if peak is None else (peak * MFU, 1.0)
        seconds = sum(each.flops / each.ranks for each in trainings) * spent / flops
        if not self._measured and seconds < 60:  # Start-up, which is left out, takes longer.
            return ""
        gpu_hours = sum(each.flops for each in trainings) * spent / flops / 3600
        on_gpus = self._here or not self._measured
        return duration(seconds) + (f" ({gpu_hours:,.1f} GPU hours)" if on_gpus else "")


def _num_controls(trainings: Sequence[Training]) -> int:
    return sum("control/" in each.place.name for each in trainings)


def duration(seconds: float) -> str:
    """Returns a time such as "5 h 3 min", "4 min 10 s" or "12 s"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
