"""One rank's whole training step in a world that has no other ranks and no memory.

The program is the one that trains: `build_sharded_model`, `TrainStep`, FSDP's hooks, recomputation,
the optimizer. Beneath it, tensors of floats have shapes and no values (torch's FakeTensor), process
groups exchange nothing (torch's FakeStore), and integers are real, because a dispatcher asks them
how many rows to send. So a step of 671 billion parameters on one of 1,024 ranks is counted in
minutes, on one core, and what is counted is what a rank would do.

Two things are not the program's: initial weights are not drawn, and a router's choice is replaced
by `spread_choice`, under which every expert gets equally many tokens of every rank; so what a peer
would send is what this rank sends. Every number that the host asks a float for is 1.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from titan_moe.config.job_config import JobConfig
from titan_moe.data.batch import Batch
from titan_moe.distributed.execution import Microbatch
from titan_moe.distributed.parallelize import ShardedModel, build_sharded_model
from titan_moe.models.config import ModelConfig
from titan_moe.optim.optimizers import build_optimizer
from titan_moe.simulate.comm_counter import NAMESPACES, Flow, Traffic, Wire, axes_of_groups
from titan_moe.train_step import StepResult, TrainStep

_aten = torch.ops.aten
_CPU = torch.device("cpu")
_INTEGER_FACTORIES = {_aten.arange.default, _aten.arange.start, _aten.arange.start_step}


class PaperWire(Wire):
    """As Wire, where no tensor of floats has values and no collective sends anything."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in NAMESPACES:
            self.count(func, args)
            return _pretend(func, args)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func is _aten._local_scalar_dense.default and isinstance(tensors[0], FakeTensor):
            return 1.0 if tensors[0].is_floating_point() else 1
        if func is _aten._pin_memory.default:
            return tensors[0]
        # A model that is being laid out; as fake tensors, it would take a minute at 1,024 ranks.
        on_meta = all(x.is_meta and not isinstance(x, FakeTensor) for x in tensors)
        if tensors and on_meta and kwargs.get("device") is None:
            return func(*args, **kwargs)
        if _is_real(func, tensors, kwargs.get("dtype")):
            return func(*args, **kwargs)
        with self._fake:
            return func(*args, **kwargs)


def _is_real(func: Any, tensors: list[Tensor], dtype: torch.dtype | None) -> bool:
    if tensors:
        return not any(isinstance(x, FakeTensor) or x.is_meta for x in tensors)
    whole = dtype is not None and not dtype.is_floating_point
    return whole or (dtype is None and func in _INTEGER_FACTORIES)


def _pretend(func: Any, args: tuple) -> Any:
    """What a collective returns if every peer holds what this rank does."""
    name, x = func.__name__.partition(".")[0], args[0]
    if func.namespace == "c10d":
        work = FakeWork().boxed()
        if name == "recv_":  # A vote on how a pipeline begins, or rows of a stream.
            x = [received.fill_(1) for received in x if not isinstance(received, FakeTensor)]
        if name == "alltoall_base_" and not isinstance(args[1], FakeTensor):
            x.copy_(_as_long(args[1], len(x)))
        alone = ("send", "recv_", "barrier", "alltoall_base_", "allgather_into_tensor_coalesced_")
        return work if name in alone else (x, work)
    if name in ("wait_tensor", "all_reduce_"):
        return x
    if name == "all_reduce":
        return x.clone()
    if name == "all_to_all_single":
        received = sum(args[1])
        if isinstance(x, FakeTensor):
            return x.new_empty((received, *x.shape[1:]))
        return _as_long(x, received).clone()
    if name == "all_gather_into_tensor":
        return x.repeat(args[1], *[1] * (x.ndim - 1))
    if name == "reduce_scatter_tensor":
        return x.new_empty((x.shape[0] // args[2], *x.shape[1:]))
    raise NotImplementedError(f"{func} in a world on paper")


def _as_long(x: Tensor, length: int) -> Tensor:
    """Peers' numbers, if there are more or fewer of them than own ones: the own ones over again."""
    return x if len(x) == length else x[torch.arange(length) % max(len(x), 1)]


def spread_choice(num_experts: int, top_k: int) -> Callable[[Tensor], Tensor]:
    """A router's choice: experts_TK of random sets, the same at each call, that give each expert
    equally many tokens of every `num_experts`.

    Sets are random because the ranks that a token reaches are then as many as under a trained
    router that is balanced: a dispatcher may send a token once to each of them.
    """

    def select_experts(scores_TE: Tensor) -> Tensor:
        num_tokens = len(scores_TE)
        # Not torch's random numbers: on paper they are floats without values.
        generator = np.random.default_rng(num_experts)
        blocks = -(-num_tokens // num_experts)
        experts_NE = np.tile(np.arange(num_experts), (blocks, 1))
        sets_NK = generator.permuted(experts_NE, axis=1)[:, None, :top_k]
        shift_NT1 = generator.permuted(experts_NE, axis=1)[..., None]
        experts_TK = ((sets_NK + shift_NT1) % num_experts).reshape(-1, top_k)[:num_tokens]
        return torch.from_numpy(experts_TK).to(scores_TE.device)

    return select_experts


class PaperRank:
    """A rank's model and step on paper, for as long as the context lasts."""

    def __init__(self, job: JobConfig, config: ModelConfig, *, world_size: int, rank: int) -> None:
        self._job, self._config = job, config
        self._world_size, self._rank = world_size, rank
        self.wire = PaperWire()
        self.new_group_calls = 0

    def __enter__(self) -> "PaperRank":
        dist.init_process_group(
            "fake", store=FakeStore(), rank=self._rank, world_size=self._world_size
        )
        make = dist.new_group

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.new_group_calls += 1
            return make(*args, **kwargs)

        with (
            mock.patch("titan_moe.distributed.parallelize.fill_initial_weights"),
            mock.patch.object(dist, "new_group", counted),
            self.wire,
        ):
            self.sharded: ShardedModel = build_sharded_model(
                self._job, self._config, device=_CPU, world_size=self._world_size
            )
        return self

    def __exit__(self, *error: object) -> None:
        dist.destroy_process_group()

    def step(self, num_microbatches: int = 1) -> "Counted":
        """Train on microbatches of the job's size."""
        training = self._job.training
        spread_tokens(self.sharded)
        rows_BS = torch.zeros(training.local_batch_size, training.seq_len, dtype=torch.int64)
        batch = Batch(rows_BS, rows_BS, rows_BS.int(), [[""]] * len(rows_BS))
        counted = Counted(self.wire)
        self.wire.clear()
        with self.wire:
            self.optimizer = build_optimizer(self._job.optimizer, self.sharded.named_parameters())
            train_step = TrainStep(self.sharded, self.optimizer, training, device=_CPU)
            self.wire.groups = axes_of_groups(self.sharded.meshes)
            # What was dropped is a number like all others here: 1, though nothing was.
            with mock.patch.object(type(self.sharded), "refuses", lambda *_: False):
                train_step([batch] * num_microbatches, observer=counted)
        assert counted.has_updated, "the step has updated nothing"
        counted.total = self.wire.traffic()
        return counted


class Counted:
    """The traffic of a step of one or two microbatches or more; an Observer of a train step."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._before: list[dict[Flow, Traffic]] = []
        self.total: dict[Flow, Traffic] = {}
        self.has_updated = False

    def reads(self, batch: Batch, rows: Microbatch) -> None:
        self._before.append(self._wire.traffic())

    def accumulated(self) -> None:
        pass

    def updated(self, result: StepResult) -> None:
        self.has_updated = True

    def of(self, num_microbatches: int) -> dict[Flow, Traffic]:
        """What a step of so many microbatches would have sent: what a further one adds, they all
        do."""
        further = num_microbatches - len(self._before)
        if not further:
            return self.total
        assert len(self._before) > 1, "what a further microbatch adds has not been seen"
        # The last two: a pipeline's ranks greet each other at its first run.
        first, second = self._before[-2:]
        found = {}
        for flow, (calls, sent) in self.total.items():
            before, after = (each.get(flow, Traffic(0, 0.0)) for each in (first, second))
            found[flow] = Traffic(
                calls + further * (after.calls - before.calls),
                sent + further * (after.bytes - before.bytes),
            )
        return found


def spread_tokens(sharded: ShardedModel) -> None:
    """Let every MoE layer select experts by `spread_choice`."""
    for moe in sharded.moe_layers().values():
        moe.routing_fn = spread_choice(moe.config.num_experts, moe.config.top_k)
