"""Small sets of layouts and options that still meet every combination."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

from titan_moe.verify.layouts.layouts import OPTIONS, SPLIT_BACKWARD, Layout, with_options


def cover_options(
    layouts: Iterable[Layout],
    *,
    fixed: Mapping[str, str] | None = None,
    legal: Callable[[Layout], bool] = lambda layout: True,
) -> list[Layout]:
    """The layouts with options handed out so that each value meets each axis above 1.

    Each layout takes, of each option, the value that its axes have met least so far. Options in
    `fixed` keep one value; values that `legal` refuses for a layout are passed over; a schedule
    with a split backward goes with recompute none alone.
    """
    fixed = fixed or {}
    met: Counter[tuple[str, str, str]] = Counter()
    chosen = []
    for layout in layouts:
        layout = with_options(layout, **fixed)
        for option, values in OPTIONS.items():
            if option in fixed or not layout.has(option):
                continue
            candidates = [with_options(layout, **{option: value}) for value in values]
            candidates = [each for each in candidates if _combines(each) and legal(each)]
            if candidates:
                layout = min(candidates, key=lambda each: _familiar(each, option, met))
        met.update(_meetings(layout))
        chosen.append(layout)
    return chosen


def cover_pairs(layouts: Sequence[Layout], count: int, seed: int) -> list[Layout]:
    """`count` layouts in which, if they suffice, each pair of axes meets above 1; then by chance.

    The same for the same arguments; in the order of `layouts`.
    """
    shuffled = list(layouts)
    random.Random(seed).shuffle(shuffled)
    uncovered = {pair for layout in layouts for pair in pairs(layout)}
    taken: list[Layout] = []
    while shuffled and len(taken) < count:
        best = max(shuffled, key=lambda layout: len(uncovered & pairs(layout)))
        shuffled.remove(best)
        uncovered -= pairs(best)
        taken.append(best)
    return [layout for layout in layouts if layout in set(taken)]


def pairs(layout: Layout) -> set[tuple[str, str]]:
    """Returns the pairs of a layout's axes that both have several ranks."""
    return set(combinations(layout.axes, 2))


def _combines(layout: Layout) -> bool:
    split = layout.pp > 1 and layout.schedule in SPLIT_BACKWARD
    return not split or layout.recompute == "none"


def _familiar(layout: Layout, option: str, met: Counter) -> tuple[int, int]:
    """Counts how often a layout's axes have met its value of an option: the rarest, then all."""
    counts = [met[meeting] for meeting in _meetings(layout) if meeting[0] == option]
    return (min(counts[:-1], default=counts[-1]), sum(counts))


def _meetings(layout: Layout) -> list[tuple[str, str, str]]:
    """Returns the values of options with the axes that they meet, and last "" for all axes."""
    return [
        (option, str(getattr(layout, option)), axis)
        for option in OPTIONS
        if layout.has(option)
        for axis in (*layout.axes, "")
    ]
