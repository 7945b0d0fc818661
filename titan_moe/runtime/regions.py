"""Names for what a step does, in a profile: `with region("dispatch"):` around what runs.

A region is a record_function while torch's profiler records, and always the position of this rank,
which a report of a hang reads (runtime/position.py). A profile counts
the backward of an operation in the region of its forward (by autograd's sequence numbers), and
forwards within a backward as recomputation; see profiling/trace.py.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.autograd.profiler import record_function

from titan_moe.runtime.position import Inside

PREFIX = "region::"
"""Prefix of a region's name in a trace."""
REGIONS = (
    "data",
    "embedding",
    "attention",
    "route",
    "dispatch",
    "experts",
    "combine",
    "shared_experts",
    "feed_forward",
    "loss",
    "grad_norm",
    "optimizer",
)
"""Names of regions, in the order of a step."""


def region(name: str) -> AbstractContextManager:
    """Marks a region, one of `REGIONS`, for a profiler. Costs 1.7 us while none records.

    A compiled layer is one region of its own: names in it would break its graph.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    if _watcher is not None:
        return _watcher(name)
    if torch.autograd._profiler_enabled():
        return _recorded(name)
    return Inside(name)


@contextmanager
def _recorded(name: str) -> Iterator[None]:
    with record_function(PREFIX + name), Inside(name):
        yield


_Watcher = Callable[[str], AbstractContextManager]
_watcher: _Watcher | None = None


@contextmanager
def watched_by(watcher: _Watcher) -> Iterator[None]:
    """Enter `watcher(name)` around every region instead of telling torch's profiler."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before


class NodeMakers:
    """Notes what the forward was doing when it made each node of autograd, by the node's number:
    autograd itself does not record which code made a node."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._made: list[tuple[str, str]] = []

    def note(self, layer: str, region: str) -> None:
        """Notes where the forward is from now on, for the next nodes."""
        if not self._made or self._made[-1] != (layer, region):
            self._begins.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            self._made.append((layer, region))

    def of(self, node: torch.autograd.graph.Node) -> tuple[str, str]:
        """Returns a node's layer and region. Both are empty for a node made before the first note,
        and for one that accumulates gradients, which has the largest number there is."""
        number = node._sequence_nr()  # type: ignore[attr-defined]
        at = bisect_right(self._begins, number) - 1
        return self._made[at] if at >= 0 and number < 1 << 62 else ("", "")
