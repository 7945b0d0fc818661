"""torch.profiler traces and snapshots of CUDA's memory, as the profiling table says."""

import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from titan_moe.config.job_config import Profiling
from titan_moe.runtime.files import replacing
from titan_moe.runtime.log import logger

_MOST_EVENTS = 100_000
"""Allocations that a snapshot remembers, as torchtitan's."""


class Steps(Protocol):
    """What the training loop sees of a profiler."""

    def step(self) -> None:
        """An optimizer step has ended."""


class _All:
    def __init__(self, members: list[Any]) -> None:
        self._members = members

    def step(self) -> None:
        for member in self._members:
            member.step()


@contextmanager
def profiler(profiling: Profiling, folder: Path, rank: int) -> Iterator[Steps]:
    """Write `step-N/rank-R.json.gz` traces and `step-N/rank-R.pickle` memory snapshots below
    `folder`; does nothing where both are off."""
    with ExitStack() as stack:
        members: list[Any] = []
        if profiling.enable_profiling:
            members.append(stack.enter_context(_traces(profiling, folder, rank)))
        if profiling.enable_memory_snapshot and torch.cuda.is_available():
            members.append(stack.enter_context(_snapshots(profiling, folder, rank)))
        yield _All(members)


def _traces(profiling: Profiling, folder: Path, rank: int) -> torch.profiler.profile:
    recorded = profiling.profiler_warmup + profiling.profiler_active

    def save(profile: torch.profiler.profile) -> None:
        path = folder / profiling.save_traces_folder / f"step-{profile.step_num}"
        path.mkdir(parents=True, exist_ok=True)
        with replacing(path / f"rank-{rank}.json.gz") as aside:
            profile.export_chrome_trace(str(aside))
        logger.info("profile of step %d: %s", profile.step_num, path)

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(
            wait=profiling.profile_freq - recorded,
            warmup=profiling.profiler_warmup,
            active=profiling.profiler_active,
        ),
        on_trace_ready=save,
        record_shapes=True,
    )


@contextmanager
def _snapshots(profiling: Profiling, folder: Path, rank: int) -> Iterator["_Snapshots"]:
    """Every profile_freq steps, and once more if memory runs out."""
    snapshots = _Snapshots(profiling, folder / profiling.save_memory_snapshot_folder, rank)
    torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
    try:
        yield snapshots
    except torch.OutOfMemoryError:
        snapshots.save(f"step-{snapshots.num_steps + 1}-out-of-memory")
        raise
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


class _Snapshots:
    def __init__(self, profiling: Profiling, folder: Path, rank: int) -> None:
        self._freq, self._folder, self._rank = profiling.profile_freq, folder, rank
        self.num_steps = 0
        """Of this process: a run that resumes counts its profiles anew."""

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps % self._freq == 0:
            self.save(f"step-{self.num_steps}")

    def save(self, name: str) -> None:
        path = self._folder / name
        path.mkdir(parents=True, exist_ok=True)
        with replacing(path / f"rank-{self._rank}.pickle") as aside, aside.open("wb") as file:
            pickle.dump(torch.cuda.memory._snapshot(), file)
        logger.info("memory snapshot: %s", path)
