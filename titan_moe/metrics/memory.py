"""Memory in use, as GiB: of the CUDA allocator, or of this process on the CPU."""

import resource
import sys
from pathlib import Path

import torch

_GIB = 2**30


def memory_metrics(device: torch.device) -> dict[str, float]:
    """What this rank holds; CUDA peaks are those since the last call.

    On CUDA "memory/peak_gib" (tensors), "memory/reserved_gib" (with the allocator's reserve) and
    "memory/allocation_retries": how often, since the start, the allocator had to free its cache to
    find room. Anything but 0 there costs time: the run is at its memory's edge.
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
