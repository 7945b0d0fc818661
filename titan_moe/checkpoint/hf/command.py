"""What the scripts that convert have in common: processes, and errors as lines."""

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.failure import print_errors
from titan_moe.runtime.launch import Launch, cpu_threads
from titan_moe.runtime.log import start_logging

_TIMEOUT = timedelta(hours=1)  # Ranks wait for the one with the slowest disk.


def run(action: Callable[[], str]) -> int:
    """Run a conversion over torchrun's processes, or this one; returns the exit code.

    What it returns is the last line on standard output. Errors that a user can mend are one line
    each, of rank 0.
    """
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
        line = action()
    except (RunError, ConfigError) as error:
        if launch.rank == 0:
            print_errors(error.lines if isinstance(error, ConfigError) else [str(error)])
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        dist.destroy_process_group()
    if launch.rank == 0:
        print(line)
    return 0
