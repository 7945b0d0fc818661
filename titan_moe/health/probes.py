"""What one rank can find out about its device, its memory, its disk and its connections.

Each probe compares with a result that is known beforehand, bit by bit, and measures a rate. What it
calls of torch is handed to it, so that tests can plant a device that is slow or wrong.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.runtime.process import backend_timeout

_MATMUL_S = {"cuda": 5.0, "cpu": 0.5}
_LARGEST = 128
"""Whole numbers up to here use all bits of a bfloat16's mantissa."""
_CHUNK = 1 << 24
"""Words of memory that are compared at once."""
_ODD = 0x9E3779B97F4A7C15
_DISK_BYTES = 64 << 20
_REPEATS = 5
_REDUCTIONS = 20


@dataclass(frozen=True)
class Operations:
    """What the probes call."""

    multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm
    read: Callable[[Tensor], Tensor] = lambda words: words
    """Of device memory."""
    read_file: Callable[[Path], bytes] = Path.read_bytes
    all_reduce: Callable[..., Any] = dist.all_reduce


@dataclass(frozen=True)
class Result:
    """What a probe found on one rank."""

    rates: dict[str, float] = field(default_factory=dict)
    """FLOP/s or bytes/s, by quantity."""
    problem: str = ""
    """What is wrong, in words."""


def matmul(device: torch.device, operations: Operations) -> Result:
    """Products of matrices of whole numbers, again and again.

    The sizes of a sum's addends stay below 2^24 together, so that it is exact in float32 in
    whatever order they are added, and the one result is known: from the CPU, in float64. Rounding
    to bfloat16 comes last. The rows repeat, so that the CPU need compute only the first ones.
    """
    is_gpu = device.type == "cuda"
    blocks, rows, inner, columns = (64, 512, 2048, 8192) if is_gpu else (4, 128, 512, 1024)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    # Else parts of a sum may be rounded to bfloat16 before they are added.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    generator = torch.Generator().manual_seed(0)
    left = torch.randint(-_LARGEST, _LARGEST, (rows, inner), generator=generator)
    right = torch.randint(-_LARGEST, _LARGEST, (inner, columns), generator=generator)
    expected = (left.double() @ right.double()).to(dtype).to(device)
    a, b = left.to(device, dtype).repeat(blocks, 1), right.to(device, dtype)
    seconds, wrong, products = [], 0, 0
    operations.multiply(a, b)
    end = time.monotonic() + _MATMUL_S[device.type]
    while products < _REPEATS or time.monotonic() < end:
        product, took = _timed(device, lambda: operations.multiply(a, b))
        seconds.append(took)
        different = product.view(blocks, rows, columns) != expected
        wrong += int(different.count_nonzero())
        products += 1
    rates = {"matmul": 2 * blocks * rows * inner * columns / median(seconds)}
    if not wrong:
        return Result(rates)
    of = f"{products * blocks * rows * columns:,} elements of {products} products"
    return Result(rates, f"{wrong:,} of {of} are wrong")


def memory(device: torch.device, operations: Operations, num_bytes: int) -> Result:
    """Fill memory with numbers that differ from word to word, then with their complements, and read
    them back; then copy one half to the other."""
    if num_bytes < 16:  # Two words, of which one is copied to the other.
        return Result(problem=f"{num_bytes} bytes are too few to test")
    words = torch.empty(num_bytes // 8, dtype=torch.int64, device=device)
    places = torch.arange(min(_CHUNK, len(words)), device=device) * _signed(_ODD)
    wrong, first = 0, ""
    for flip in (0, -1):
        for start in range(0, len(words), _CHUNK):
            chunk = words[start : start + _CHUNK]
            torch.bitwise_xor(places[: len(chunk)], _pattern(start, flip), out=chunk)
        for start in range(0, len(words), _CHUNK):
            chunk = operations.read(words[start : start + _CHUNK])
            flipped = chunk ^ places[: len(chunk)] ^ _pattern(start, flip)
            if found := int(flipped.count_nonzero()):
                at = int(flipped.ne(0).nonzero()[0])
                first = first or f"word {start + at}, bits {int(flipped[at]) % 2**64:#x}"
                wrong += found
    half = len(words) // 2
    seconds = [
        _timed(device, lambda: words[half : 2 * half].copy_(words[:half]))[1]
        for _ in range(_REPEATS)
    ]
    # Read and written.
    rates = {"memory": 2 * 8 * half / median(seconds)}
    if not wrong:
        return Result(rates)
    said = (
        f"{wrong:,} of {2 * len(words):,} words were read back with other bits; the first: {first}"
    )
    return Result(rates, said)


def _pattern(start: int, flip: int) -> int:
    return _signed((start + 1) * _ODD) ^ flip


def _signed(number: int) -> int:
    """The number's last 64 bits, as an int64 has them."""
    return (number + 2**63) % 2**64 - 2**63


def bytes_to_test(device: torch.device) -> int:
    """How much memory a rank tests: of a GPU nine tenths of what is free; of a host, which other
    processes use too, a quarter of a GiB."""
    if device.type == "cuda":
        return int(0.9 * torch.cuda.mem_get_info(device)[0])
    return 1 << 28


def disk(folder: Path, rank: int, operations: Operations) -> Result:
    """Write a file, wait until it is on the disk, and read it back from there."""
    data = (
        torch.randint(
            256, (_DISK_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank)
        )
        .numpy()
        .data
    )
    digest = hashlib.sha256(data).digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".health-") as file:
            began = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            written = time.perf_counter()
            # Else the page cache would answer.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            back = operations.read_file(Path(file.name))
            read = time.perf_counter()
    except OSError as error:
        return Result(problem=f"cannot write and read in {folder}: {error.strerror}")
    rates = {"write": _DISK_BYTES / (written - began), "read": _DISK_BYTES / (read - written)}
    if hashlib.sha256(back).digest() == digest:
        return Result(rates)
    return Result(rates, f"a file in {folder} was read back with other bytes")


def all_reduce(
    ranks: Sequence[int], device: torch.device, operations: Operations, timeout_s: int
) -> Result:
    """Sum whole numbers over `ranks`, this one among them, in a process group of their own;
    collective."""
    is_gpu = device.type == "cuda"
    group = dist.new_group(
        list(ranks),
        timeout=backend_timeout(timeout_s),
        backend="nccl" if is_gpu else "gloo",
        # Ranks outside of it may hang.
        use_local_synchronization=True,
    )
    # A prime, so that no part of the sum looks like its neighbour.
    places = torch.arange(1 << (24 if is_gpu else 20), dtype=torch.int32, device=device) % 1009
    own, expected = places * (dist.get_rank() + 1), places * sum(rank + 1 for rank in ranks)
    values, seconds, wrong = own.clone(), [], 0
    operations.all_reduce(values, group=group)
    for _ in range(_REDUCTIONS):
        values.copy_(own)
        _, took = _timed(device, lambda: operations.all_reduce(values, group=group))
        seconds.append(took)
        wrong += int((values != expected).count_nonzero())
    dist.destroy_process_group(group)
    rates = {"all-reduce": values.nbytes / median(seconds)}
    if not wrong:
        return Result(rates)
    return Result(rates, f"{wrong:,} of {_REDUCTIONS * len(values):,} sums are wrong")


def _timed(device: torch.device, call: Callable[[], Any]) -> tuple[Any, float]:
    """The call's value, and the seconds that the device took."""
    _synchronize(device)
    began = time.perf_counter()
    value = call()
    _synchronize(device)
    return value, time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
