"""Makes what is written next while something is written."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ahead(make: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yields what `make` makes of each item, in order: in a thread, and one item ahead, so that two
    results are held at most. Raises what `make` raises, in its item's turn."""
    with ThreadPoolExecutor(1) as thread:
        later: Future[R] | None = None
        for item in items:
            now, later = later, thread.submit(make, item)
            if now is not None:
                yield now.result()
        if later is not None:
            yield later.result()
