"""The learning rate of every step: linear warm-up, a stable stretch, a decay."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from titan_moe.config.errors import as_written
from titan_moe.config.job_config import LRScheduler

logger = logging.getLogger(__name__)


class Decay(NamedTuple):
    """Position of a step in the decay."""

    step: int
    begin: int
    """The last step at the peak: the end of the warm-up, or of the stable stretch after it."""
    progress: float
    """0 at step `begin`, 1 at the last step of the schedule and after it."""


DECAYS: dict[str, Callable[[Decay], float]] = {
    "linear": lambda at: 1 - at.progress,
    "sqrt": lambda at: 1 - math.sqrt(at.progress),
    "cosine": lambda at: (1 + math.cos(math.pi * at.progress)) / 2,
    "inverse_sqrt": lambda at: math.sqrt(at.begin / at.step),
}
"""Functions that return the share of the decay that remains at a step's position in it."""


def lr_factor(step: int, config: LRScheduler, training_steps: int) -> float:
    """The factor on the peak learning rate that optimizer step `step` is taken with.

    Steps count from 1; the schedule ends at `total_steps`, or at `training_steps` where that is
    left out. With W warm-up steps and D decay steps (`decay_ratio` of the schedule, at most what
    the warm-up leaves; all of that where it is left out) the factor is

    - step / W up to step W: 1 / W at step 1, exactly 1 at step W;
    - 1 up to step total - D;
    - then from 1 down to `min_lr_factor`, which the last step takes exactly, and later ones keep.

    A decay of 0 steps never leaves 1; a run shorter than its warm-up takes the first steps of it.
    The decays: linear, 1 - sqrt(progress) as in arXiv 2405.18392, and half a cosine. inverse_sqrt,
    of arXiv 1706.03762, has no end: the factor comes near `min_lr_factor` as 1 / sqrt(step) falls.
    """
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    total_steps = config.total_steps or training_steps
    decay_steps = max(0, total_steps - config.warmup_steps)
    if config.decay_ratio is not None:
        decay_steps = min(decay_steps, round(total_steps * config.decay_ratio))
    begin = total_steps - decay_steps
    if decay_steps == 0 or step <= begin:
        return 1.0
    at = Decay(step, begin, progress=min(1.0, (step - begin) / decay_steps))
    return config.min_lr_factor + (1 - config.min_lr_factor) * DECAYS[config.decay_type](at)


def warn_of_changed_rate(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> None:
    """Warn in a run that goes on after `step` at other learning rates than the configuration which
    made its checkpoint gave, from the next step on or a later one. Both are tables of keys, as a
    manifest has them.
    """
    if not step or not before.keys() >= {"lr_scheduler", "optimizer", "training"}:
        return
    (old, planned_rate), (new, rate_now) = _schedule(before), _schedule(now)
    changed = [f"{key}={as_written(value)}" for key, value in old.items() if new[key] != value]
    for ahead in range(step + 1, now["training"]["steps"] + 1 if changed else 0):
        planned, rate = planned_rate(ahead), rate_now(ahead)
        if not math.isclose(planned, rate):
            logger.warning(
                "the learning rate changes: step %d would have been taken at %.3g by the "
                "checkpoint's configuration, and is at %.3g; %s keeps the earlier schedule",
                *(ahead, planned, rate, " ".join(changed)),
            )
            return


def _schedule(job: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[int], float]]:
    """Returns the keys that decide the learning rate, and the rate of each step."""
    shape, peak = LRScheduler.model_validate(job["lr_scheduler"]), job["optimizer"]["lr"]
    steps = job["training"]["steps"]
    keys = shape.model_dump() | {"total_steps": shape.total_steps or steps}
    named = {"optimizer.lr": peak} | {f"lr_scheduler.{k}": v for k, v in keys.items()}
    return named, lambda step: peak * lr_factor(step, shape, steps)


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Give every group its own peak learning rate times factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
