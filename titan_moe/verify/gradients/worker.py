"""One rank of the gate: trains its part of the model, and compares all that it holds."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import Batch
from titan_moe.distributed.grad_norm import clip_factor
from titan_moe.distributed.parallelize import ShardedModel, build_sharded_model
from titan_moe.models.config import ModelConfig
from titan_moe.moe.layer import MoE
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.optim.schedules import set_lr
from titan_moe.train_step import StepResult, TrainStep
from titan_moe.verify.gradients.compare import (
    Pair,
    TensorDifference,
    Tolerance,
    by_cause,
    differences,
)
from titan_moe.verify.gradients.fixture import RATES, Fixture, norms
from titan_moe.verify.gradients.poison import Poison
from titan_moe.verify.gradients.reference import Rows, Step
from titan_moe.verify.layouts.layouts import Layout, stages
from titan_moe.verify.layouts.shards import Shards

_MOST_SHOWN = 40
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_BUFFERS = ("expert_bias", "previous_load")

Snapshot = dict[str, dict[str, Tensor]]
"""A rank's own parts after a step, by quantity as in `Step` and by name."""


class Task(NamedTuple):
    """The task of every rank of one layout."""

    job: JobConfig
    config: ModelConfig
    layout: Layout
    fixture_path: Path
    """A saved Fixture; ranks map the same pages."""
    tolerance: Tolerance


@dataclass
class RankReport:
    """The differences on one rank."""

    worst: TensorDifference
    wrong: list[TensorDifference] = field(default_factory=list)
    """Above the bound: the largest of each quantity and step, then causes first; not all."""
    num_wrong: int = 0
    num_compared: int = 0
    problems: list[str] = field(default_factory=list)
    """Problems that no error measures: a foreign parameter, other first weights."""
    tails: int = 0
    paddings: int = 0
    """Rows that were poisoned."""


def verify_on_rank(task: Task) -> RankReport:
    """Train two steps and compare this rank's shares with the reference's; collective."""
    # Eight ranks' worth of torch's deprecations would hide the progress bar.
    warnings.simplefilter("ignore", FutureWarning)
    fixture: Fixture = torch.load(task.fixture_path, mmap=True, weights_only=False)
    rank = dist.get_rank()
    sharded = build_sharded_model(
        task.job, task.config, device=torch.device("cpu"), world_size=dist.get_world_size()
    )
    state = LocalState(sharded, task, fixture)
    if state.problems:
        return RankReport(TensorDifference(0, rank, "", "", 0.0, 1.0), problems=state.problems)
    state.fill(fixture)
    poison = Poison()
    poison.apply(state.moe_layers.values())
    found = [
        difference
        for number, (result, snapshot) in enumerate(_train(sharded, state, task, fixture))
        for difference in state.compare(number, result, snapshot, fixture.steps[number])
    ]
    wrong = sorted((d for d in found if not d.error <= task.tolerance.bound), key=by_cause)
    return RankReport(
        worst=max(found, key=lambda d: d.error),
        wrong=_one_of_each(wrong)[:_MOST_SHOWN],
        num_wrong=len(wrong),
        num_compared=len(found),
        tails=poison.tails,
        paddings=poison.paddings,
    )


class LocalState:
    """The parameters, buffers and optimizer state of this rank, and where they lie in the whole."""

    def __init__(self, sharded: ShardedModel, task: Task, fixture: Fixture) -> None:
        self.rank = dist.get_rank()
        self.floor = task.tolerance.floor
        self.shards = Shards(task.layout, stages(task.layout))
        self.parameters = dict(sharded.named_parameters())
        self.moe_layers: dict[str, MoE] = sharded.moe_layers()
        held = {name for name in fixture.weights if self.shards.holds(self.rank, name)}
        self.problems = [
            f"rank {self.rank}: {name} is {'missing' if name in held else 'not its own'}"
            for name in sorted(held ^ self.parameters.keys())
        ]
        if self.problems:
            return
        self.boxes = {
            name: self.shards.box(self.rank, name, fixture.weights[name].shape) for name in held
        }
        for name, parameter in self.parameters.items():
            expected = fixture.production[name][self.boxes[name]].to(parameter.dtype)
            ours = local(parameter).detach()
            if ours.shape != expected.shape:
                self.problems.append(
                    f"rank {self.rank}: {name} has {list(ours.shape)} here, by arithmetic "
                    f"{list(expected.shape)}"
                )
            elif not torch.equal(ours, expected):
                self.problems.append(f"rank {self.rank}: {name} begins with other values")

    @torch.no_grad()
    def fill(self, fixture: Fixture) -> None:
        """Take the fixture's weights and buffers, cut by arithmetic."""
        for name, parameter in self.parameters.items():
            local(parameter).copy_(fixture.weights[name][self.boxes[name]])
        for name, layer in self.moe_layers.items():
            layer.router.expert_bias.copy_(fixture.buffers[f"{name}.moe.router.expert_bias"])
            layer.router.previous_load.copy_(fixture.buffers[f"{name}.moe.router.previous_load"])

    def compare(
        self, number: int, result: StepResult, snapshot: Snapshot, step: Step
    ) -> list[TensorDifference]:
        """Compares everything that a step left on this rank."""
        differing: list[TensorDifference] = []

        def add(quantity: str, pairs: Iterable[Pair]) -> None:
            differing.extend(differences(number, self.rank, quantity, pairs, floor=self.floor))

        for quantity in ("gradients", "parameters", *_MOMENTS):
            pairs = self._pairs(snapshot[quantity], getattr(step, quantity))
            add(quantity.removesuffix("s"), pairs)
        assert result.counts_LE is not None
        snapshot["counts"] = dict(zip(step.counts, result.counts_LE, strict=True))
        for quantity in (*_BUFFERS, "counts"):
            theirs = getattr(step, quantity)
            whole = {name: tensor.double().norm().item() for name, tensor in theirs.items()}
            ours = snapshot[quantity].items()
            add(quantity, [Pair(name, x, theirs[name], whole[name]) for name, x in ours])
        measured: dict[str, Any] = vars(result) | (result.metrics or {})
        for quantity in ("loss", "grad_norm", "balance_loss", "mtp_loss", "num_targets"):
            add(quantity, [scalars(measured.get(quantity), getattr(step, quantity))])
        return differing

    def _pairs(self, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Iterable[Pair]:
        """Parts side by side, experts one by one; what the reference has none of is wrong."""
        missing = torch.empty(0)
        for name in ours.keys() - theirs.keys():
            yield Pair(name, ours[name], missing.to(ours[name]), 0.0)
        boxes = {name: box for name, box in self.boxes.items() if name in theirs}
        wholes = norms({name: theirs[name] for name in boxes})
        for name, box in boxes.items():
            part, whole = theirs[name][box], wholes[name].tolist()
            own = ours.get(name, missing)
            if ".experts." not in name or own.shape != part.shape:
                yield Pair(name, own, part, max(whole))
                continue
            for row, expert in enumerate(range(box[0].start, box[0].stop)):
                yield Pair(f"{name}[{expert}]", own[row], part[row], whole[expert])


def scalars(ours: float | None, theirs: float | None) -> Pair:
    """A number of the whole step; where there is none, 0. Not rounded: float32 would hide 1e-8."""
    a, b = (torch.tensor(value or 0.0, dtype=torch.float64) for value in (ours, theirs))
    return Pair("", a, b, 0.0)


def _train(
    sharded: ShardedModel, state: LocalState, task: Task, fixture: Fixture
) -> Iterable[tuple[StepResult, Snapshot]]:
    job, layout, parameters = task.job, task.layout, state.parameters
    optimizer = build_optimizer(job.optimizer, parameters.items(), sharded.meshes.group)
    step_fn = TrainStep(sharded, optimizer, job.training, device=torch.device("cpu"))
    given: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        given.update({n: _copy(p.grad) for n, p in parameters.items() if p.grad is not None})

    optimizer.register_step_pre_hook(keep)
    place = state.shards.coordinate(state.rank, "dp_replicate") * layout.dp_shard
    place += state.shards.coordinate(state.rank, "dp_shard")
    for rows, rate in zip(fixture.batches, RATES, strict=True):
        set_lr(optimizer, rate)
        given.clear()
        result = step_fn(own_batches(rows, job.training.local_batch_size, place, layout.data_ranks))
        clip = clip_factor(result.grad_norm, job.training.max_norm)
        gradients = {name: gradient / clip for name, gradient in given.items()}
        yield result, _snapshot(state, gradients, optimizer)


def own_batches(rows: Rows, local_batch_size: int, place: int, data_ranks: int) -> list[Batch]:
    """The microbatches of one data rank."""
    own = len(rows.tokens_BS) // data_ranks
    starts = range(own * place, own * (place + 1), local_batch_size)
    return [
        Batch(
            rows.tokens_BS[start : start + local_batch_size],
            rows.labels_BS[start : start + local_batch_size],
            rows.documents_BS[start : start + local_batch_size],
            [[] for _ in range(local_batch_size)],
        )
        for start in starts
    ]


def local(tensor: Tensor) -> Tensor:
    """The memory that this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _snapshot(state: LocalState, gradients: dict[str, Tensor], optimizer: Optimizer) -> Snapshot:
    parameters = state.parameters
    taken = {"gradients": gradients, "parameters": {n: _copy(p) for n, p in parameters.items()}}
    for which in _MOMENTS:
        held = {n: optimizer.state[p] for n, p in parameters.items()}
        taken[which] = {n: _copy(moments[which]) for n, moments in held.items() if which in moments}
    for which in _BUFFERS:
        layers = state.moe_layers.items()
        taken[which] = {n: getattr(moe.router, which).clone() for n, moe in layers}
    return taken


def _copy(tensor: Tensor | nn.Parameter) -> Tensor:
    return local(tensor.detach()).clone()


def _one_of_each(wrong: list[TensorDifference]) -> list[TensorDifference]:
    """The largest of each quantity and step first, then the others."""
    first: dict[tuple[int, str], TensorDifference] = {}
    for difference in wrong:
        first.setdefault((difference.step, difference.quantity), difference)
    return [*first.values(), *(d for d in wrong if d not in first.values())]
