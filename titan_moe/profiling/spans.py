"""Spans of time: their union, their length and what they have in common."""

from collections.abc import Iterable, Iterator, Sequence

Span = tuple[float, float]
"""Start and end in microseconds."""


def union(spans: Iterable[Span]) -> list[Span]:
    """The same instants as disjoint spans, ascending."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def clipped(spans: Iterable[Span], window: Span) -> list[Span]:
    """The parts of the spans that lie in the window."""
    inside = ((max(start, window[0]), min(end, window[1])) for start, end in spans)
    return [(start, end) for start, end in inside if end > start]


def length(spans: Iterable[Span]) -> float:
    """Of disjoint spans."""
    return sum(end - start for start, end in spans)


class Overlap:
    """Overlaps of ascending windows with disjoint ascending spans; each span is passed once."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._first = 0

    def of(self, start: float, end: float) -> float:
        """Microseconds of [start, end] within the spans; `start` is never less than before."""
        return length(self._within(start, end))

    def _within(self, start: float, end: float) -> Iterator[Span]:
        while self._first < len(self._spans) and self._spans[self._first][1] <= start:
            self._first += 1
        for span in self._spans[self._first :]:
            if span[0] >= end:
                return
            yield max(start, span[0]), min(end, span[1])
