"""Mistakes of the kind that a noise band must find: training goes on, and the curve looks right."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from titan_moe.config.job_config import JobConfig
from titan_moe.distributed.dtensor import local_part
from titan_moe.distributed.parallelize import ShardedModel
from titan_moe.moe.layer import MoE
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


def double_routers(sharded: ShardedModel, step_fn: TrainStep) -> None:
    gates = [moe.router.gate.weight for moe in sharded.moe_layers().values()]
    spoil_grads(step_fn, lambda: [gate.grad.mul_(2) for gate in gates])  # type: ignore


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


def enlarge_all(sharded: ShardedModel, step_fn: TrainStep) -> None:
    parameters = [parameter for _, parameter in sharded.named_parameters()]
    spoil_grads(step_fn, lambda: [parameter.grad.mul_(1.01) for parameter in parameters])  # type: ignore


def drop_shared_experts(sharded: ShardedModel, step_fn: TrainStep) -> None:
    for moe in sharded.moe_layers().values():
        moe.shared_experts = None


def drop_a_shared_expert(sharded: ShardedModel, step_fn: TrainStep) -> None:
    _last(sharded).shared_experts = None


def _last(sharded: ShardedModel) -> MoE:
    *_, last = (moe for name, moe in sharded.moe_layers().items() if "mtp" not in name)
    return last


_BUSY = {"layer": "layers.2", "expert": 1}
_BUSY_HALVED: Alter = partial(scale_an_expert, **_BUSY, factor=0.5)  # type: ignore[arg-type]
_BUSY_DROPPED: Alter = partial(scale_an_expert, **_BUSY, factor=0.0)  # type: ignore[arg-type]

MISTAKES: Mapping[str, Mistake] = {
    "learning rate 2 % off": Mistake(lr_factor=1.02),
    "shared experts dropped": Mistake(alter=drop_shared_experts),
    "one expert's gradient halved": Mistake(alter=_BUSY_HALVED),
    "bias update missing": Mistake({"moe": {"bias_update_speed": 0.0}}),
    "learning rate 1 % off": Mistake(lr_factor=1.01),
    "learning rate 0.5 % off": Mistake(lr_factor=1.005),
    "one layer's shared expert dropped": Mistake(alter=drop_a_shared_expert),
    "one expert's gradient dropped": Mistake(alter=_BUSY_DROPPED),
    "routers' gradients doubled": Mistake(alter=double_routers),
    "all gradients 1 % too large": Mistake(alter=enlarge_all),
    "sequence-wise auxiliary loss dropped": Mistake({"moe": {"sequence_aux_loss_weight": 0.0}}),
    "no weight decay": Mistake({"optimizer": {"weight_decay": 0.0}}),
    "beta2 0.99 instead of 0.95": Mistake({"optimizer": {"beta2": 0.99}}),
    "warm-up one step longer": Mistake({"lr_scheduler": {"warmup_steps": 4}}),
}
