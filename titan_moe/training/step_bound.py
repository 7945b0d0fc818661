"""Lays measured steps beside the time that `titan-moe plan` estimates for their layout."""

import logging
from dataclasses import replace

from torch import Tensor

from titan_moe.metrics.jsonl import PREDICTED
from titan_moe.parallelize.plan import Plan
from titan_moe.planner.load import BALANCED, Load
from titan_moe.planner.step_time import step_time
from titan_moe.runtime.gpus import Device

logger = logging.getLogger(__name__)

_SETTLED = 3
"""The logged step of a layout that is compared with its bound, from 1. The first one compiles and
connects, and the second one's seconds may be a single step's."""


class StepBound:
    """Knows what a layout's step should take on a device; nothing if the device is not known."""

    def __init__(self, plan: Plan, device: Device | None, ranks_per_node: int) -> None:
        self._plan, self._num_logged = plan, 0
        self._device = device and replace(device, node=ranks_per_node)

    def compare(self, step: int, seconds: float, counts_LE: Tensor | None) -> dict[str, float]:
        """Log a layout's first logged step, and its settled one, beside the estimate.

        Args:
            seconds: of one step, a mean since the last logged one.
            counts_LE: tokens per layer and expert, the load that is estimated.

        Returns the estimated seconds by region as metrics; {} at other steps.
        """
        self._num_logged += 1
        if self._device is None or self._num_logged not in (1, _SETTLED):
            return {}
        parts = step_time(self._plan, self._device, _load(counts_LE))
        total, most = sum(parts.values()), max(parts, key=lambda region: parts[region])
        line = f"{seconds:.2f} s a step, {total:.2f} s predicted"
        line += f"; most of it {most} {parts[most]:.2f} s"
        if self._num_logged == 1:
            logger.info("time at step %d: %s", step, line)
        else:
            share = 100 * total / seconds
            logger.info("step %d: %.0f %% of this layout's bound: %s", step, share, line)
        return {PREDICTED + region: value for region, value in parts.items() if value}


def _load(counts_LE: Tensor | None) -> Load:
    if counts_LE is None:
        return BALANCED
    shares_LE = counts_LE / counts_LE.sum(1, keepdim=True).clamp(min=1)
    return Load("measured", tuple(map(tuple, shares_LE.tolist())))
