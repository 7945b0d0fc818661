"""Where the host's time goes between two logged steps."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """Adds up wall seconds per named phase: `with phases("data"): batch = next(loader)`.

    The seconds are the host's: work that a GPU has queued counts in the phase that waits for it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - start

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call, as {"time/<phase>": seconds}; starts anew."""
        metrics = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics
