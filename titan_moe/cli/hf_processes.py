"""The processes of `hf import` and `hf export`: torchrun's, or this one."""

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_moe.runtime.launch import Launch, cpu_threads
from titan_moe.runtime.log import start_logging

_TIMEOUT = timedelta(hours=1)  # Ranks wait for the one with the slowest disk.


def in_processes(action: Callable[[], str]) -> str:
    """Run a conversion over torchrun's processes, or this one; returns what it returns."""
    launch = Launch.from_environment(os.environ)
    start_logging(launch.rank, {0}, color=False)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cpu_threads(launch.local_world_size))
    alone = launch.world_size == 1
    dist.init_process_group(
        "gloo",
        store=dist.HashStore() if alone else None,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=_TIMEOUT,
    )
    try:
        return action()
    finally:
        dist.destroy_process_group()
