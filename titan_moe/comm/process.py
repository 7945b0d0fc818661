"""One rank: its process group, timeouts, random state and garbage collection."""

import gc
import logging
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from titan_moe.config.job_config import AxisOptions, Comm, Debug
from titan_moe.runtime import host_gloo
from titan_moe.runtime.device import backend_for, pick_device, use_flash_attention_3
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.launch import Launch, attempt_number, count_gpus, cpu_threads
from titan_moe.runtime.stopping import attempt_folder

logger = logging.getLogger(__name__)

BACKEND_GRACE_S = 30
"""Seconds after a collective's limit until the backend ends it: a report of the hang comes
first."""


@dataclass(frozen=True, kw_only=True)
class Process(Launch):
    """Describes this rank; its process group is up."""

    device: torch.device

    @property
    def is_main(self) -> bool:
        """True for the rank that writes the run's files."""
        return self.rank == 0


@contextmanager
def process_group(
    launch: Launch, comm: Comm, environment: Mapping[str, str], *, deterministic: bool = False
) -> Iterator[Process]:
    """Join the other ranks, and leave them when the block ends without an exception.

    After an exception nothing is torn down: peers may be blocked in a collective, and NCCL's
    destructors would wait for them. Raises RunError if the ranks cannot meet.
    """
    device = pick_device(launch, count_gpus(environment), share_gpus=comm.share_gpus)
    backend = backend_for(device, launch.local_world_size, share_gpus=comm.share_gpus)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        use_flash_attention_3(device)
        torch._C._set_sm_carveout_experimental(comm.parameter_sms)
        if deterministic and "NCCL_ALGO" not in os.environ:
            # NVLink's switches add in an order that varies. NCCL reads this when it makes its first
            # communicator; torch would choose too, but for groups made after `seed_everything`, and
            # leaves the trees that add in switches.
            os.environ["NCCL_ALGO"] = "^NVLS,NVLSTree"
            logger.info("debug.deterministic: NCCL_ALGO=^NVLS,NVLSTree, for sums in a fixed order")
    elif "OMP_NUM_THREADS" not in environment:
        torch.set_num_threads(cpu_threads(launch.local_world_size))
    if backend == host_gloo.BACKEND:
        ranks, gpus = launch.local_world_size, torch.cuda.device_count()
        if launch.rank == 0:
            logger.info("%d ranks share %d GPU(s); collectives go through the host", ranks, gpus)
        if device.type == "cuda":  # As much of its memory for each, so that none fails for another.
            torch.cuda.set_per_process_memory_fraction(1 / -(-ranks // gpus), device)
    # torch reads it when it makes the first group. The environment's size goes first.
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environment:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(comm.trace_buf_size))
    timeout = backend_timeout(comm.init_timeout_seconds)
    try:
        # With a device_id torch splits the world's communicator for each group of NCCL: all ranks
        # then make one at once, each its own.
        dist.init_process_group(
            backend,
            timeout=timeout,
            pg_options=nccl_options(comm, tokens=False) if "nccl" in backend else None,
            device_id=device if comm.split_communicators and "nccl" in backend else None,
            store=_store(launch, timeout, environment),
            rank=launch.rank,
            world_size=launch.world_size,
        )
    except (RuntimeError, ValueError) as error:  # DistErrors; a FileStore's are no more than that.
        reason = str(error).splitlines()[0]
        raise RunError(f"rank {launch.rank} cannot join the process group: {reason}") from error
    yield Process(**asdict(launch), device=device)
    dist.destroy_process_group()


def backend_timeout(seconds: int) -> timedelta:
    """Returns a backend's timeout for collectives that may wait for `seconds`."""
    return timedelta(seconds=seconds + BACKEND_GRACE_S)


def nccl_options(comm: Comm, tokens: bool, own: AxisOptions | None = None) -> Any:
    """Returns NCCL's options of a group for tokens or for parameters, under those of its axis."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = backend_timeout(comm.init_timeout_seconds)  # Else torch warns.
    # A layer waits for tokens, for parameters only if they were not gathered early enough.
    options.is_high_priority_stream = tokens
    if not tokens and comm.parameter_sms is not None:
        options.config.max_ctas = comm.parameter_sms
    own = own or AxisOptions()
    if own.high_priority is not None:
        options.is_high_priority_stream = own.high_priority
    if own.min_ctas is not None:
        options.config.min_ctas = own.min_ctas
    if own.max_ctas is not None:
        options.config.max_ctas = own.max_ctas
    return options


def _store(launch: Launch, timeout: timedelta, environment: Mapping[str, str]) -> dist.Store:
    """Returns the store in which the ranks meet: on one machine a file, which listens on no port,
    else torchrun's store. The latter outlives an attempt to run: a prefix for each attempt keeps a
    rank from the address of a dead one."""
    if launch.world_size == 1 and "MASTER_ADDR" not in environment:
        return dist.HashStore()
    folder = attempt_folder(environment)
    if launch.num_nodes == 1 and folder is not None:
        file = dist.FileStore(str(folder / "store"), launch.world_size)
        file.set_timeout(timeout)
        return file
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(f"attempt-{attempt_number(environment)}", store)


def set_timeouts(seconds: int, groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Set the longest wait for a collective of `groups`; None is the group of all ranks.

    Must run on all ranks at once, a shorter wait not before the first step has ended: it must not
    meet a rank that still compiles or allocates.
    """
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for group in groups:
        set_timeout(seconds, group)


def set_timeout(seconds: int, group: dist.ProcessGroup | None) -> None:
    """Set the longest wait for a collective of one group from now on."""
    _set_pg_timeout(backend_timeout(seconds), group)


def seed_everything(debug: Debug) -> None:
    """Seed the generators of Python, NumPy and torch, alike on every rank.

    Initial weights and data order do not depend on this state: they have their own generators.
    With `debug.deterministic` torch raises (or warns) if it has no deterministic kernel.
    """
    random.seed(debug.seed)
    np.random.seed(debug.seed % 2**32)
    torch.manual_seed(debug.seed)
    if not debug.deterministic:
        return
    # cuBLAS reads it when it makes its first handle.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)


def collect_everything() -> None:
    """Free all unused cycles, also among the objects that `gc.freeze` keeps from collection."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
