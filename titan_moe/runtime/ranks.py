"""Run a function on N ranks of this machine."""

import gc
import re
import tempfile
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

from titan_moe.runtime.process_pool import TIMEOUT_S, WorkerError, outcomes

# A rank whose peer has gone raises one of these: never the cause.
_CONSEQUENCE = re.compile(r"Connection (closed|reset|refused)|Broken pipe|Timed out waiting")


class RankError(RuntimeError):
    """A rank raised or died; the message holds its traceback."""


def run_on_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    device: str = "cpu",
    share_gpus: bool = False,
) -> list:
    """Call `fn(*args)` on every rank of a world and return the ranks' results in rank order.

    The world's backend is gloo; with the device "cuda", rank i has GPU i, and NCCL too. With
    `share_gpus`, ranks beyond the last GPU begin again with the first, and collectives go through
    the host, as they also do on a CPU.

    `fn` must be importable (a module's top-level function); results travel by pickle. Inside, torch
    runs on one thread and `torch.distributed` is initialised; a collective ends with the call.
    Raises RankError with the failing rank's traceback, or when ranks have not ended after
    `timeout_s`; no process outlives the call.
    """
    with tempfile.TemporaryDirectory() as folder:
        world = str(Path(folder) / "store"), world_size, timeout_s, device, share_gpus
        ends = outcomes(
            _on_rank,
            [(rank, *world, fn, args) for rank in range(world_size)],
            num_workers=world_size,
            preload="titan_moe.training.trainer",
            timeout_s=timeout_s,
        )
        results: dict[int, Any] = {}
        errors: list[tuple[str, str]] = []
        """Error and traceback of each failed rank; the cause first, if it is known."""
        with closing(ends):
            try:
                for rank, value, error in ends:
                    if error is None:
                        results[rank] = value
                        continue
                    if not _CONSEQUENCE.search(error):
                        errors.insert(0, (f"rank {rank}", error))
                        break
                    errors.append((f"rank {rank}", error))
            except WorkerError as late:
                waited = "\n".join(error for _, error in errors)  # Stacks: where they waited.
                errors = [("ranks", f"{late}\n{waited}")]
    if errors:
        (who, cause), *others = errors
        last = [f"{other}: {error.splitlines()[-1]}" for other, error in others]
        raise RankError("\n".join([f"{who}:\n{cause.rstrip()}", *last]))
    return [results[rank] for rank in range(world_size)]


def _on_rank(
    rank: int,
    store: str,
    world_size: int,
    timeout_s: float,
    device: str,
    share_gpus: bool,
    fn: Callable[..., Any],
    args: tuple,
) -> Any:
    import torch
    import torch.distributed as dist

    from titan_moe.runtime.device import backend_for

    gc.enable()  # A training may be long.
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count() if share_gpus else rank)
    dist.init_process_group(
        backend_for(torch.device(device), world_size, share_gpus=share_gpus),
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        # Earlier than the whole call: the rank's own traceback says where it hangs.
        timeout=timedelta(seconds=timeout_s - min(30, timeout_s / 2)),
    )
    value = fn(*args)
    dist.barrier()
    return value
