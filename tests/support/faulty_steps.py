"""Short trainings in which the step on a given batch has a spike or a NaN, wherever in the run it
is, and the same by hand."""

import os
import signal
from collections.abc import Mapping

from tests.support.trainings import train_here
from titan_moe.config.job_config import JobConfig


def train_with_faults(
    job: JobConfig,
    faults: Mapping[int, str],
    *,
    kill_in: int | None = None,
) -> bool:
    """Train on this rank; batches of the data are counted from 1. Spikes are judged by 4 norms.

    Args:
        faults: "spike", "nan" (an output) or "gradient" (infinite) by batch, on the last rank.
        kill_in: the last rank dies by SIGKILL in the step of so many batches read by this process.
    """
    import torch
    import torch.distributed as dist

    from titan_moe import bad_steps
    from titan_moe.data.loader import Loader
    from titan_moe.models.output import Output
    from titan_moe.moe.experts import Experts

    bad = dist.get_rank() == dist.get_world_size() - 1
    next_step, num_read, fault = Loader.next_step, 0, ""

    def counted(self):
        nonlocal num_read, fault
        batches = next_step(self)
        num_read += 1
        fault = faults.get(self.state_dict()["step"], "") if bad else ""
        if bad and num_read == kill_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return batches

    experts, loss = Experts.forward, Output.forward
    factors = {"spike": 1000.0, "gradient": float("inf")}

    def forward(self, rows):
        y_RD = experts(self, rows)
        return y_RD * float("nan") if fault == "nan" else y_RD

    def loss_with_spike(self, *args):
        value = loss(self, *args)
        if fault in factors and torch.is_grad_enabled():
            factor = factors[fault]
            value.register_hook(lambda grad: grad * factor)
        return value

    Loader.next_step, Experts.forward, Output.forward = counted, forward, loss_with_spike
    bad_steps.FEWEST = 4
    return train_here(job)


def train_leaving_out_update(job: JobConfig, step: int) -> bool:
    """Train on this rank, without the update of a step."""
    from titan_moe.train_step import TrainStep

    update, steps = TrainStep._update, iter(range(1, 1 + job.training.steps))

    def update_if_wanted(self, result) -> None:
        if next(steps) != step:
            update(self, result)

    TrainStep._update = update_if_wanted
    return train_here(job)
