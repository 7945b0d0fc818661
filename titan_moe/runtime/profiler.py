"""torch.profiler traces, as the profiling table says."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from titan_moe.config.observation import Profiling
from titan_moe.runtime.log import logger


class Steps(Protocol):
    """What the training loop sees of a profiler."""

    def step(self) -> None:
        """An optimizer step has ended."""


class _Off:
    def step(self) -> None:
        pass


@contextmanager
def profiler(profiling: Profiling, folder: Path, rank: int) -> Iterator[Steps]:
    """Write `step-N/rank-R.json.gz` traces below `folder`; does nothing when profiling is off."""
    if not profiling.enable_profiling:
        yield _Off()
        return
    recorded = profiling.profiler_warmup + profiling.profiler_active

    def save(profile: torch.profiler.profile) -> None:
        path = folder / profiling.save_traces_folder / f"step-{profile.step_num}"
        path.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path / f"rank-{rank}.json.gz"))
        logger.info("profile of step %d: %s", profile.step_num, path)

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(
            wait=profiling.profile_freq - recorded,
            warmup=profiling.profiler_warmup,
            active=profiling.profiler_active,
        ),
        on_trace_ready=save,
        record_shapes=True,
    ) as profile:
        yield profile
