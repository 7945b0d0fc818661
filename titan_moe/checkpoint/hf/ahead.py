"""Makes what is written next while something is written."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ahead(make: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yields what `make` makes of each item, in order: in a thread, and one item ahead, so that two
    results are held at most. Raises what `make` raises, in its item's turn."""
    with ThreadPoolExecutor(1) as thread:
        begun: deque[Future[R]] = deque()
        for item in items:
            begun.append(thread.submit(make, item))
            if len(begun) == 2:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
