"""Checks of devices and connections on ranks of which some are bad, as planted."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_moe.health.probes import Operations
from titan_moe.runtime.ranks import run_on_ranks

BAD, OTHER = 1, 2
"""The rank that is bad, and of a bad pair the other one."""
SLOW = 0.15
"""Far below what the noise of a busy machine does; a planted slowness is one in 13 or less."""
_RANKS = 3
_TIMES_SLOWER = 12
_SLOW_S, _FOR_EVER = 0.3, 600.0


def problems(
    folder: Path, *plants: str, ranks_per_node: int = _RANKS, timeout_s: int = 60
) -> list[str]:
    """The lines of the verdict, the same on all ranks."""
    first, *others = run_on_ranks(check_planted, _RANKS, folder, plants, ranks_per_node, timeout_s)
    assert all(other == first for other in others)
    return first


def check_planted(
    folder: Path, plants: tuple[str, ...], ranks_per_node: int, timeout_s: int
) -> list[str]:
    import torch
    import torch.distributed as dist

    from titan_moe.health.check import Settings, check_health
    from titan_moe.runtime.process import Process

    rank = dist.get_rank()
    operations = Operations()
    for plant in plants:
        operations = PLANTS[plant](operations, rank)
    process = Process(
        rank=rank,
        world_size=dist.get_world_size(),
        local_rank=rank % ranks_per_node,
        local_world_size=ranks_per_node,
        device=torch.device("cpu"),
    )
    settings = Settings(folder, timeout_s, slow=SLOW, memory_gib=2**-5)
    return check_health(process, settings, operations, print).problems


def _slow_matmul(operations: Operations, rank: int) -> Operations:
    import torch

    if rank != BAD:
        return operations

    def multiply(a, b):
        began = time.perf_counter()
        product = torch.mm(a, b)
        time.sleep(_TIMES_SLOWER * (time.perf_counter() - began))
        return product

    return replace(operations, multiply=multiply)


def _wrong_matmul(operations: Operations, rank: int) -> Operations:
    import torch

    def multiply(a, b):
        product = torch.mm(a, b)
        product.view(torch.int32)[3, 5] ^= 1
        return product

    return replace(operations, multiply=multiply) if rank == BAD else operations


def _failing_matmul(operations: Operations, rank: int) -> Operations:
    def multiply(a, b):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    return replace(operations, multiply=multiply) if rank == BAD else operations


def _flipped_memory(operations: Operations, rank: int) -> Operations:
    def read(words):
        words = words.clone()
        words[77] ^= 1 << 40
        return words

    return replace(operations, read=read) if rank == OTHER else operations


def _wrong_pair(operations: Operations, rank: int) -> Operations:
    def all_reduce(values, group):
        plain(values, group=group)
        if _is_bad_pair(group):
            values[99] += 1

    plain = operations.all_reduce
    return replace(operations, all_reduce=all_reduce)


def _slow_pair(operations: Operations, rank: int) -> Operations:
    def all_reduce(values, group):
        if rank == BAD and _is_bad_pair(group):
            time.sleep(_SLOW_S)
        plain(values, group=group)

    plain = operations.all_reduce
    return replace(operations, all_reduce=all_reduce)


def _hung_pair(operations: Operations, rank: int) -> Operations:
    def all_reduce(values, group):
        if rank == BAD and _is_bad_pair(group):
            time.sleep(_FOR_EVER)
        plain(values, group=group)

    plain = operations.all_reduce
    return replace(operations, all_reduce=all_reduce)


def _wrong_link(operations: Operations, rank: int) -> Operations:
    """What the bad rank sends is wrong, to whatever rank."""

    def all_reduce(values, group):
        values[0] += rank == BAD
        plain(values, group=group)

    plain = operations.all_reduce
    return replace(operations, all_reduce=all_reduce)


def _is_bad_pair(group: Any) -> bool:
    import torch.distributed as dist

    return set(dist.get_process_group_ranks(group)) == {BAD, OTHER}


PLANTS: dict[str, Callable[[Operations, int], Operations]] = {
    "slow matmul": _slow_matmul,
    "wrong matmul": _wrong_matmul,
    "failing matmul": _failing_matmul,
    "flipped memory": _flipped_memory,
    "wrong pair": _wrong_pair,
    "slow pair": _slow_pair,
    "hung pair": _hung_pair,
    "wrong link": _wrong_link,
}
