"""Garbage collection in the same step on all ranks.

Python collects when its own counters say so, on each rank in another step, and every other rank
then waits in the next collective.
"""

import gc


class GarbageCollector:
    """Takes over from Python's automatic collection."""

    def __init__(self, freq: int) -> None:
        """Collect every `freq` steps."""
        self._freq = freq
        gc.disable()
        # What start-up made lives as long as the run: no collection needs to visit it again.
        gc.freeze()

    def step(self, step: int) -> None:
        """Collect the young generations if it is time; `step` is the step that has ended."""
        if step % self._freq == 0:
            gc.collect(1)
