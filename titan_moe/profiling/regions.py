"""Names for what a step does, in a profile: `with region("dispatch"):` around what runs.

A region is a record_function while torch's profiler records, and always the position of this rank,
which a report of a hang reads (runtime/position.py). What the backward does for it is found in a
profile by who made its operations (autograd's sequence numbers), and what recomputation does by its
running inside the backward; see profiling/trace.py.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.autograd.profiler import record_function

from titan_moe.runtime.position import Inside

PREFIX = "region::"
"""Of a region's name in a trace."""
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
"""In the order of a step."""


def region(name: str) -> AbstractContextManager:
    """One of `REGIONS`. Measured: 1.7 us where no profiler records.

    A compiled layer is one region of its own: names in it would break its graph.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    if torch.autograd._profiler_enabled():
        return _recorded(name)
    return Inside(name)


@contextmanager
def _recorded(name: str) -> Iterator[None]:
    with record_function(PREFIX + name), Inside(name):
        yield
