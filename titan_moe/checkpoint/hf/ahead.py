"""One thing ahead: reading and summing run beside writing."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


def one_ahead(make: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """`make` of each item, in order; in another thread the next is made while one is in use."""
    with ThreadPoolExecutor(1) as pool:
        coming: list[Future[T]] = []
        for item in items:
            coming.append(pool.submit(make, item))
            if len(coming) == 2:
                yield coming.pop(0).result()
        while coming:
            yield coming.pop(0).result()
