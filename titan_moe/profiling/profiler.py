"""torch.profiler traces and snapshots of CUDA's memory, as the profiling table says."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from titan_moe.config.job_config import Profiling
from titan_moe.runtime.files import replacing
from titan_moe.runtime.log import logger

_MOST_EVENTS = 100_000
"""Allocations that a snapshot remembers, as torchtitan's."""


@contextmanager
def profiler(profiling: Profiling, folder: Path, rank: int) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each optimizer step.

    Writes `step-N/rank-R.json.gz` traces and `step-N/rank-R.pickle` memory snapshots below
    `folder`; does nothing where both are off.
    """
    with ExitStack() as stack:
        steps: list[Callable[[], None]] = []
        if profiling.enable_profiling:
            steps.append(stack.enter_context(_traces(profiling, folder, rank)).step)
        if profiling.enable_memory_snapshot and torch.cuda.is_available():
            steps.append(stack.enter_context(_snapshots(profiling, folder, rank)))

        def step() -> None:
            for each in steps:
                each()

        yield step


def _traces(profiling: Profiling, folder: Path, rank: int) -> torch.profiler.profile:
    recorded = profiling.profiler_warmup + profiling.profiler_active

    def save(profile: torch.profiler.profile) -> None:
        path = folder / profiling.save_traces_folder / f"step-{profile.step_num}"
        path.mkdir(parents=True, exist_ok=True)
        with replacing(path / f"rank-{rank}.json.gz") as aside:
            profile.export_chrome_trace(str(aside))
        logger.info("profile of step %d: %s", profile.step_num, path)

    return torch.profiler.profile(
        schedule=torch.profiler.schedule(
            wait=profiling.profile_freq - recorded,
            warmup=profiling.profiler_warmup,
            active=profiling.profiler_active,
        ),
        on_trace_ready=save,
        record_shapes=True,
    )


@contextmanager
def _snapshots(profiling: Profiling, folder: Path, rank: int) -> Iterator[Callable[[], None]]:
    """Save a snapshot every profile_freq steps, and once more if memory runs out.

    Steps are counted in this process: a run that resumes counts its profiles anew.
    """
    num_steps = 0

    def save(name: str) -> None:
        path = folder / profiling.save_memory_snapshot_folder / name
        path.mkdir(parents=True, exist_ok=True)
        with replacing(path / f"rank-{rank}.pickle") as aside, aside.open("wb") as file:
            pickle.dump(torch.cuda.memory._snapshot(), file)
        logger.info("memory snapshot: %s", path)

    def step() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps % profiling.profile_freq == 0:
            save(f"step-{num_steps}")

    torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
    try:
        yield step
    except torch.OutOfMemoryError:
        save(f"step-{num_steps + 1}-out-of-memory")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
