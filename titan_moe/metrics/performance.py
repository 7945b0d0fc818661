"""What a run costs: where the host's time goes, throughput, and memory."""

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_GIB = 2**30


class Phases:
    """Adds up wall seconds per named phase between two logged steps:
    `with phases("data"): batch = next(loader)`.

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


@dataclass(frozen=True)
class Throughput:
    """Turns tokens and seconds into metrics."""

    flops_per_token: float
    num_devices: int
    peak_tflops: float | None
    """Of one device, in the type it computes in; None where unknown."""

    def metrics(self, num_tokens: int, seconds: float) -> dict[str, float]:
        """Rates over num_tokens of the whole job in `seconds` of wall time; "mfu" is a fraction."""
        tokens_per_second = num_tokens / seconds
        per_device = tokens_per_second / self.num_devices
        tflops = per_device * self.flops_per_token / 1e12
        metrics = {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": per_device,
            "tflops_per_device": tflops,
        }
        if self.peak_tflops is not None:
            metrics["mfu"] = tflops / self.peak_tflops
        return metrics


def memory_metrics(device: torch.device) -> dict[str, float]:
    """What this rank holds, in GiB; CUDA peaks are those since the last call.

    On CUDA "memory/peak_gib" (tensors), "memory/reserved_gib" (with the allocator's reserve) and
    "memory/allocation_retries": how often, since the start, the allocator had to free its cache to
    find room. Anything but 0 there costs time: the run needs nearly all of the GPU's memory.
    On the CPU "memory/resident_gib" and "memory/peak_gib", the most since the process started.
    """
    if device.type == "cuda":
        return _cuda_metrics(device)
    return _process_metrics()


def _cuda_metrics(device: torch.device) -> dict[str, float]:
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {
        "memory/peak_gib": stats["allocated_bytes.all.peak"] / _GIB,
        "memory/reserved_gib": stats["reserved_bytes.all.peak"] / _GIB,
        "memory/allocation_retries": stats["num_alloc_retries"],
    }


def _process_metrics() -> dict[str, float]:
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    metrics = {"memory/peak_gib": peak / _GIB}
    statm = Path("/proc/self/statm")
    if statm.exists():
        resident_pages = int(statm.read_text().split()[1])
        metrics["memory/resident_gib"] = resident_pages * resource.getpagesize() / _GIB
    return metrics
