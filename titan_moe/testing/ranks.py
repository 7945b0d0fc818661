"""Run a function on N gloo ranks of this machine.

Ranks are forked from a server that has imported torch once: a fresh process each time (no stale
process groups, no stale DTensor caches, no shared random state) without torch's import each time.
"""

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# What every rank would import anyway; FSDP2 and the first optimizer bring in torch._dynamo.
_PRELOAD = ["torch", "torch._dynamo", "titan_moe.trainer", "titan_moe.testing.ranks"]


class RankError(RuntimeError):
    """A rank raised or died; the message holds its traceback."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list:
    """Call `fn(*args)` on every rank of a gloo world and return the ranks' results in rank order.

    `fn` must be importable (a module's top-level function); results travel by pickle. Inside, torch
    runs on one thread and `torch.distributed` is initialised. Raises RankError with the first
    failing rank's traceback, or when no rank reports for `timeout_s`; no process outlives the call.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(theirs, store, rank, world_size, fn, args), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], timeout_s: float) -> list:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        pending = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(pending, timeout_s)
        if not ready:
            raise RankError(f"ranks {sorted(set(range(len(pipes))) - set(results))} said nothing")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                error, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if error is not None:
                raise RankError(f"rank {rank}:\n{error}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    pipe: Connection, store: str, rank: int, world_size: int, fn: Callable[..., Any], args: tuple
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        value = fn(*args)
        dist.barrier()
        # Plain pickle: multiprocessing's own would share tensors by file handles that die with us.
        pipe.send_bytes(pickle.dumps((None, value)))
        dist.destroy_process_group()
    except BaseException:  # DCP's CheckpointException is no Exception.
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
