"""Check the GPUs, connections and disk of a cluster before a long run.

    torchrun --nproc-per-node 8 -m scripts.check_cluster --folder outputs
    srun torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        -m scripts.check_cluster --folder outputs

Each rank multiplies matrices of whole numbers, writes a file into FOLDER and reads it back, and
sums whole numbers with every other rank, pair by pair. Every result is known beforehand to the bit.
Rank 0 prints the rates, and names each rank or pair whose result is wrong or whose rate is far
below that of its like. Ranks that wait too long in a check name it and end. Works on CPUs too.

Exit codes: 0 nothing is wrong; 1 something is.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from titan_moe.runtime.device import backend_for, pick_device
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.launch import Launch, count_gpus, end_with_parent

_SLOW = {"cuda": 0.8, "cpu": 0.3}
_DISK_BYTES = 64 << 20
_LIMIT_S = 120

Lines = tuple[list[str], list[str]]
"""Rates, and what is wrong."""
Check = tuple[str, tuple[int, ...]]
"""Its name, and the one or two ranks that made it."""
Result = tuple[float, int]
"""FLOP/s or bytes/s, and the number of elements that are not what they must be."""


def matmul(device: torch.device, multiply: Any) -> Result:
    """Multiply again and again. Sums stay below 2^24, so they are exact in any order."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (768, torch.float32)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    left, right = (torch.randint(-32, 33, (rows, size)) for rows in (256, size))
    expected = (left.double() @ right.double()).to(device, dtype).repeat(size // 256, 1)
    a, b = left.to(device, dtype).repeat(size // 256, 1), right.to(device, dtype)
    repeats = 1000 if device.type == "cuda" else 50
    seconds, wrong = _measure(device, repeats, lambda: multiply(a, b), expected)
    return 2 * size**3 / seconds, wrong


def disk(folder: Path, rank: int) -> Result:
    """Write a file, wait until it is on the disk, and read it back. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    data = os.urandom(_DISK_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".check-{rank}-") as file:
        began = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        took = time.perf_counter() - began
        # The page cache must not answer for the disk.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _DISK_BYTES / took, 0 if Path(file.name).read_bytes() == data else _DISK_BYTES


def pair_sums(pair: tuple[int, ...], device: torch.device, reduce: Any) -> Result:
    """Sum whole numbers over two ranks, in a process group of their own; collective."""
    group = dist.new_group(list(pair), use_local_synchronization=True)
    # A prime, so that no part of the sum looks like its neighbour.
    places = torch.arange(1 << (24 if device.type == "cuda" else 18), device=device) % 1009
    own, expected = places * (dist.get_rank() + 1), places * sum(rank + 1 for rank in pair)

    def summed() -> torch.Tensor:
        reduce(values := own.clone(), group=group)
        return values

    seconds, wrong = _measure(device, 20, summed, expected)
    dist.destroy_process_group(group)
    return own.nbytes / seconds, wrong


def check(
    folder: Path, device: torch.device, *, multiply: Any = torch.mm, reduce: Any = dist.all_reduce
) -> Lines:
    """Make all checks; returns `verdict`, the same on every rank. Collective."""
    rank, host, results = dist.get_rank(), os.uname().nodename, dict[Check, Result]()
    with _limit(f"matmul of rank {rank}"):
        results["matmul", (rank,)] = matmul(device, multiply)
    with _limit(f"disk of rank {rank}"):
        results["disk", (rank,)] = disk(folder, rank)
    size = dist.get_world_size()
    for turn in range(size):  # Each rank has one partner in a turn, or pauses.
        pair = tuple(sorted({rank, (turn - rank) % size}))
        if len(pair) == 2:
            with _limit(f"all-reduce of ranks {pair[0]} and {pair[1]}"):
                results["all-reduce", pair] = pair_sums(pair, device, reduce)
        else:  # torch 2.14 names a group by the number that a rank has made: keep it equal.
            dist.destroy_process_group(dist.new_group([rank], use_local_synchronization=True))
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, (host, results))
    found: dict[Check, Result] = {}
    for _, of_rank in everyone:
        for key, result in of_rank.items():  # Either rank of a pair may see more.
            found[key] = max(found.get(key, result), result, key=lambda each: (each[1], -each[0]))
    return verdict(found, [host for host, _ in everyone], _SLOW[device.type])


def verdict(found: dict[Check, Result], hosts: list[str], slow: float) -> Lines:
    """Returns a line of rates for each kind of check, and one for whatever is wrong or slow.

    Slow is less than `slow` times the median; of disks, which ranks share, nothing is called slow.
    """
    kinds: dict[str, dict[tuple[int, ...], Result]] = {}
    for (name, ranks), result in found.items():
        between = " between machines" if len({hosts[rank] for rank in ranks}) > 1 else ""
        kinds.setdefault(f"{name}{between}", {})[ranks] = result
    rates, problems = [], []
    for name, results in kinds.items():
        usual = median(rate for rate, _ in results.values())
        least = min(rate for rate, _ in results.values())
        rates.append(f"{name}: median {usual / 1e9:,.2f} G/s, slowest {least / 1e9:,.2f} G/s")
        for ranks, (rate, wrong) in results.items():
            who = " and ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks)
            if wrong:
                problems.append(f"{who}: {name}: {wrong:,} elements are wrong")
            elif name != "disk" and rate < slow * usual:
                problems.append(f"{who}: {name}: {100 * rate / usual:.0f} % of the median rate")
    return rates, problems


@contextmanager
def _limit(what: str) -> Iterator[None]:
    """End the process with one line if the block takes too long."""

    line = f"error: {what} has not ended after {_LIMIT_S} s"
    timer = threading.Timer(_LIMIT_S, lambda: (print(line, flush=True), os._exit(1)))
    timer.start()
    yield
    timer.cancel()


def _measure(device: torch.device, times: int, call: Any, expected: Any) -> tuple[float, int]:
    """Returns the median seconds that the device took, and how many elements were wrong."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds, wrong = [], 0
    for _ in range(times):
        synchronize()
        began = time.perf_counter()
        value = call()
        synchronize()
        seconds.append(time.perf_counter() - began)
        wrong += int((value != expected).count_nonzero())
    return median(seconds), wrong


def main() -> int:
    """Check as a rank of torchrun."""
    parser = argparse.ArgumentParser(description="Check a cluster; started by torchrun.")
    parser.add_argument("--folder", type=Path, default=Path("outputs"), help="on the disk to check")
    folder = parser.parse_args().folder
    end_with_parent()
    try:
        device = pick_device(Launch.from_environment(os.environ), count_gpus(os.environ))
    except RunError as error:
        sys.exit(f"error: {error}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend_for(device))
    rates, problems = check(folder, device)
    if dist.get_rank() == 0:
        print("\n".join([*rates, *(f"error: {line}" for line in problems)]), flush=True)
    dist.destroy_process_group()
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
