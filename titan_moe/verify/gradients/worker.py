"""One rank of the gate: trains what it holds of the model, and compares all of it."""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config.job_config import JobConfig
from titan_moe.config.plugins import import_modules
from titan_moe.data.batch import Batch
from titan_moe.distributed.dtensor import local_part
from titan_moe.distributed.grad_norm import clip_factor
from titan_moe.models.config import ModelConfig
from titan_moe.moe.layer import MoE
from titan_moe.optim.schedules import set_lr
from titan_moe.training.train_step import StepResult, build_step
from titan_moe.verify.gradients.compare import TOLERANCES, TensorDifference, compare, module_norms
from titan_moe.verify.gradients.fixture import RATES, Fixture, norms, own_batches
from titan_moe.verify.gradients.poison import Poison
from titan_moe.verify.layouts.layouts import Layout, stages
from titan_moe.verify.layouts.shards import Shards

Snapshot = dict[str, dict[str, Tensor]]
"""A rank's own shards after a step, by quantity as in `Step` and by name."""


class Task(NamedTuple):
    """The task of every rank of one layout."""

    job: JobConfig
    config: ModelConfig
    layout: Layout
    fixture_path: Path
    """A saved Fixture; ranks map the same pages."""
    device: str = "cpu"
    """"cuda": a rank trains on the GPU that is its current one."""


class RankReport(NamedTuple):
    """Holds the differences on one rank."""

    differences: list[TensorDifference]
    """All that was compared."""
    problems: list[str]
    """Problems that no error measures: a foreign parameter, other first weights."""
    tails: int = 0
    paddings: int = 0
    """Rows that were poisoned."""


def verify_on_rank(task: Task) -> RankReport:
    """Train two steps and compare this rank's shares with the reference's; collective."""
    # Eight ranks' worth of torch's deprecations would hide the progress bar.
    warnings.simplefilter("ignore", FutureWarning)
    import_modules(task.job.job.imports)  # The process that read the configuration could.
    state = LocalState(task)
    if state.problems:
        return RankReport([], state.problems)
    state.fill()
    poison = Poison(state.moe_layers.values(), task.device)
    found = [
        difference
        for number, (result, snapshot) in enumerate(_train(state))
        for difference in state.compare(number, result, snapshot)
    ]
    return RankReport(found, [], int(poison.tails), int(poison.paddings))


class LocalState:
    """Holds this rank's shards of the model, its training, and the shards' places in the whole."""

    def __init__(self, task: Task) -> None:
        self.task, self.rank = task, dist.get_rank()
        device = torch.device(task.device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.fixture: Fixture = torch.load(task.fixture_path, mmap=True, weights_only=False)
        self.sharded, self.optimizer, self.train_step = build_step(
            task.job, task.config, device=device
        )
        self.shards = Shards(task.layout, stages(task.layout))
        self.parameters = dict(self.sharded.named_parameters())
        self.moe_layers: dict[str, MoE] = self.sharded.moe_layers()
        held = {name: local_part(p).shape for name, p in self.parameters.items()}
        shapes = {name: weight.shape for name, weight in self.fixture.weights.items()}
        self.problems = self.shards.problems(self.rank, held, shapes)
        if self.problems:
            return
        self.boxes = {name: self.shards.box(self.rank, name, shapes[name]) for name in held}
        for name, parameter in self.parameters.items():
            expected = self.fixture.production[name][self.boxes[name]].to(parameter.dtype)
            # A GPU's generator draws other numbers than the reference's.
            if device.type == "cpu" and not torch.equal(local_part(parameter), expected):
                self.problems.append(f"{name} begins with other values")

    @torch.no_grad()
    def fill(self) -> None:
        """Gives the model its shards of the fixture's weights and buffers, cut by arithmetic."""
        weights, buffers = self.fixture.weights, self.fixture.buffers
        for name, parameter in self.parameters.items():
            local_part(parameter).copy_(weights[name][self.boxes[name]])
        for part in self.sharded.parts:
            for name, buffer in part.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])

    def batches(self, batch: Batch) -> list[Batch]:
        """The microbatches of this rank."""
        layout = self.task.layout
        place = self.shards.coordinate(self.rank, "dp_replicate") * layout.dp_shard
        place += self.shards.coordinate(self.rank, "dp_shard")
        local_batch_size = self.task.job.training.local_batch_size
        return own_batches(batch, local_batch_size, place, layout.data_ranks)

    def compare(
        self, number: int, result: StepResult, snapshot: Snapshot
    ) -> Iterator[TensorDifference]:
        """Compares everything that a step left on this rank."""
        step = self.fixture.steps[number]
        share = TOLERANCES[self.task.job.training.dtype].least_share
        where = number, self.rank
        assert result.counts_LE is not None
        counts = result.counts_LE.cpu()
        snapshot["counts"] = dict(zip(step.tensors["counts"], counts, strict=True))
        for quantity, theirs in step.tensors.items():
            for name, *pair, whole in self._pairs(snapshot[quantity], theirs):
                yield compare((*where, quantity, name), *pair, least_norm=share * whole)
        measured: dict[str, Any] = vars(result) | (result.metrics or {})
        for quantity, reference in step.numbers.items():
            ours = scalar(measured.get(quantity))
            yield compare((*where, quantity, ""), ours, scalar(reference), least_norm=0.0)

    def _pairs(
        self, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor, Tensor, float]]:
        """Yields names, this rank's tensors beside the reference's, experts one by one, and the
        norm of the whole. A tensor that only one of the two has is wrong."""
        missing = torch.empty(0)
        wanted = [name for name in theirs if name in self.boxes or name in ours]
        wholes = norms({name: theirs[name] for name in wanted}) | module_norms(theirs)
        for name in ours.keys() - theirs.keys():
            yield name, ours[name], missing, 0.0
        for name in wanted:
            box, whole = self.boxes.get(name, ()), wholes[name].tolist()
            own, shard = ours.get(name, missing), theirs[name][box]
            if ".experts." not in name or own.shape != shard.shape:
                yield name, own, shard, max(whole)
                continue
            for place, expert in enumerate(range(box[0].start, box[0].stop)):
                yield f"{name}[{expert}]", own[place], shard[place], whole[expert]


def scalar(number: float | None) -> Tensor:
    """A number of the whole step; 0 if there is none. Not rounded: float32 would hide 1e-8."""
    return torch.tensor(number or 0.0, dtype=torch.float64)


def _train(state: LocalState) -> Iterator[tuple[StepResult, Snapshot]]:
    given: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        own = state.parameters.items()
        given.update({n: _copy(p.grad) for n, p in own if p.grad is not None})

    state.optimizer.register_step_pre_hook(keep)
    for batch, rate in zip(state.fixture.batches, RATES, strict=True):
        set_lr(state.optimizer, rate)
        given.clear()
        result = state.train_step(state.batches(batch))
        clip = clip_factor(result.grad_norm, state.task.job.training.max_norm)
        yield result, _snapshot(state, {name: gradient / clip for name, gradient in given.items()})


def _snapshot(state: LocalState, gradients: dict[str, Tensor]) -> Snapshot:
    taken: Snapshot = defaultdict(dict, gradient=gradients)
    for name, parameter in state.parameters.items():
        taken["parameter"][name] = _copy(parameter)
        for moment, value in state.optimizer.state[parameter].items():
            taken[moment][name] = _copy(value)
    for name, moe in state.moe_layers.items():
        taken["expert_bias"][name] = _copy(moe.router.expert_bias)
        taken["previous_load"][name] = _copy(moe.router.previous_load)
    return taken


def _copy(tensor: Tensor) -> Tensor:
    return local_part(tensor.detach()).to("cpu", copy=True)
