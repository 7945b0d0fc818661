"""Mistakes of the kind that a noise band must find: training goes on, and the curve looks right."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from titan_moe.config.job_config import JobConfig
from titan_moe.distributed.dtensor import local_part
from titan_moe.distributed.parallelize import ShardedModel
from titan_moe.train_step import TrainStep
from titan_moe.verify.layouts.layouts import with_tables

Alter = Callable[[ShardedModel, TrainStep], None]


@dataclass(frozen=True)
class Mistake:
    """Other settings than the baseline's, or something wrong in the model or its step."""

    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values by table and key."""
    lr_factor: float = 1.0
    alter: Alter | None = None

    def job(self, baseline: JobConfig) -> JobConfig:
        """The baseline's job with the mistake's settings."""
        lr = {"optimizer": {"lr": baseline.optimizer.lr * self.lr_factor}}
        return with_tables(with_tables(baseline, lr), self.settings)


def spoil_grads(step_fn: TrainStep, spoil: Callable[[], None]) -> None:
    """Spoil a step's gradients when all of its microbatches have been through."""
    reduce = step_fn._reduce

    def spoil_and_reduce(*args):  # type: ignore[no-untyped-def]
        spoil()
        return reduce(*args)

    step_fn._reduce = spoil_and_reduce  # type: ignore[method-assign]


def scale_an_expert(
    sharded: ShardedModel, step_fn: TrainStep, *, layer: str, expert: int, factor: float
) -> None:
    """One process holds all experts."""
    named = {name.removesuffix(".block"): moe for name, moe in sharded.moe_layers().items()}
    weights = list(named[layer].experts.parameters())
    spoil_grads(
        step_fn,
        lambda: [local_part(weight.grad)[expert].mul_(factor) for weight in weights],  # type: ignore
    )


def drop_shared_experts(sharded: ShardedModel, step_fn: TrainStep) -> None:
    for moe in sharded.moe_layers().values():
        moe.shared_experts = None


_BUSY = {"layer": "layers.2", "expert": 1}
_BUSY_HALVED: Alter = partial(scale_an_expert, **_BUSY, factor=0.5)  # type: ignore[arg-type]
_BUSY_DROPPED: Alter = partial(scale_an_expert, **_BUSY, factor=0.0)  # type: ignore[arg-type]

MISTAKES: Mapping[str, Mistake] = {
    "learning rate 2 % off": Mistake(lr_factor=1.02),
    "shared experts dropped": Mistake(alter=drop_shared_experts),
    "one expert's gradient halved": Mistake(alter=_BUSY_HALVED),
    "bias update missing": Mistake({"moe": {"bias_update_speed": 0.0}}),
    "one expert's gradient dropped": Mistake(alter=_BUSY_DROPPED),
    "warm-up one step longer": Mistake({"lr_scheduler": {"warmup_steps": 4}}),
}
