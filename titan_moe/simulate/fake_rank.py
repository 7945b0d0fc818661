"""One rank's whole training step in a world that has no other ranks and no memory.

The program is the one that trains: `build_step`, FSDP's hooks, recomputation,
the optimizer. Beneath it, tensors of floats have shapes and no values (torch's FakeTensor), process
groups exchange nothing (torch's FakeStore), and integers are real, because a dispatcher reads from
them how many rows to send. So a step of 671 billion parameters on one of 1,024 ranks is counted in
minutes, on one core, and what is counted is what a rank would do.

Two things differ from training: initial weights are not drawn, and the routers' choice is
`balanced_choice`, under which every expert gets equally many tokens of every rank; so what a peer
would send is what this rank sends. Every number that the host reads from a float tensor is 1.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from titan_moe.config.job_config import JobConfig, Parallelism
from titan_moe.data.batch import Batch
from titan_moe.distributed.execution import LocalBatch
from titan_moe.models.config import ModelConfig
from titan_moe.moe.router import GivenExperts
from titan_moe.parallelize.parallelize import ShardedModel
from titan_moe.simulate.comm_counter import COLLECTIVES, CommCounter, Flow, Volume, axes_of_groups
from titan_moe.simulate.storages import StorageCounter
from titan_moe.training.train_step import Observer, build_step

CPU = torch.device("cpu")
_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_INTEGER_FACTORIES = {_aten.arange.default, _aten.arange.start, _aten.arange.start_step}


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a world without the others: its process groups exchange nothing.

    Torch keeps what it has learnt of a mesh and takes another one of the same ranks for it: what
    can be cleared is cleared at the end; a process that is several ranks in turn is not safe.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()


class FakeCommCounter(CommCounter):
    """Counts where no tensor of floats has values and no collective sends anything."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def execute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # Half of all calls.
            return args[0].fake_device
        if func.namespace in COLLECTIVES:
            return fake_collective(func, args)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func is _aten._local_scalar_dense.default and isinstance(tensors[0], FakeTensor):
            return 1.0 if tensors[0].is_floating_point() else 1
        if func is _aten._pin_memory.default:
            return tensors[0]
        if func is _aten.equal.default and isinstance(tensors[0], FakeTensor):
            return True
        # A model that is being laid out; as fake tensors, it would take a minute at 1,024 ranks.
        on_meta = all(x.is_meta and not isinstance(x, FakeTensor) for x in tensors)
        if tensors and on_meta and kwargs.get("device") is None:
            return func(*args, **kwargs)
        if _is_real(func, tensors, kwargs.get("dtype")):
            return func(*args, **kwargs)
        if func is _aten._grouped_mm.default:
            return _fake_grouped_mm(*args, **kwargs)
        with self._fake:
            return func(*args, **kwargs)


def _fake_grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """torch 2.13's own shapes are of bfloat16 alone. Rows times experts; or, for the gradient of
    the experts, rows times rows."""
    rows = (len(offs), len(x)) if w.ndim == 2 else (len(x),)
    return x.new_empty((*rows, w.shape[-1]))


def _is_real(func: Any, tensors: list[Tensor], dtype: torch.dtype | None) -> bool:
    if tensors:
        return not any(isinstance(x, FakeTensor) or x.is_meta for x in tensors)
    integers = dtype is not None and not dtype.is_floating_point
    return integers or (dtype is None and func in _INTEGER_FACTORIES)


def fake_collective(func: Any, args: tuple) -> Any:
    """Returns a collective's result as if every peer held what this rank holds."""
    name, x = func.__name__.partition(".")[0], args[0]
    if func.namespace == "c10d":
        work = FakeWork().boxed()
        if name == "recv_":  # A vote on how a pipeline begins, or activations.
            x = [received.fill_(1) for received in x if not isinstance(received, FakeTensor)]
        if name == "alltoall_base_" and not isinstance(args[1], FakeTensor):
            x.copy_(_as_long(args[1], len(x)))
        work_only = ("send", "recv_", "barrier", "alltoall_base_", "gather_")
        coalesced = name == "allgather_into_tensor_coalesced_"
        return work if name in work_only or coalesced else (x, work)
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
    raise NotImplementedError(f"{func} in a fake world")


def _as_long(x: Tensor, length: int) -> Tensor:
    """Returns a rank's own numbers, repeated to the length of its peers'; zeros if it has none."""
    if not len(x):
        return x.new_zeros((length, *x.shape[1:]))
    return x if len(x) == length else x[torch.arange(length) % len(x)]


def balanced_choice(num_experts: int, top_k: int) -> Callable[[Tensor], Tensor]:
    """Returns a router's choice: experts_TK of random sets, the same at each call, that give each
    expert equally many tokens of every `num_experts`.

    Sets are random because the ranks that a token goes to are then as many as under a trained
    router that is balanced: a dispatcher may send a token once to each of them.
    """

    def select_experts(scores_TE: Tensor) -> Tensor:
        num_tokens = len(scores_TE)
        # Not torch's random numbers: in a fake world they are floats without values.
        generator = np.random.default_rng(num_experts)
        blocks = -(-num_tokens // num_experts)
        experts_NE = np.tile(np.arange(num_experts), (blocks, 1))
        sets_NK = generator.permuted(experts_NE, axis=1)[:, None, :top_k]
        shift_NT1 = generator.permuted(experts_NE, axis=1)[..., None]
        experts_TK = ((sets_NK + shift_NT1) % num_experts).reshape(-1, top_k)[:num_tokens]
        return torch.from_numpy(experts_TK).to(scores_TE.device)

    return select_experts


def balance_routers(sharded: ShardedModel) -> None:
    """Let every MoE layer select experts by `balanced_choice`."""
    for moe in sharded.moe_layers().values():
        choose = balanced_choice(moe.config.num_experts, moe.config.top_k)
        moe.router.select = GivenExperts("balanced", choose)


def empty_batch(job: JobConfig) -> Batch:
    """Returns a microbatch of the job's size: every token is 0."""
    training = job.training
    tokens_BS = torch.zeros(training.local_batch_size, training.seq_len, dtype=torch.int64)
    return Batch(tokens_BS, tokens_BS, tokens_BS.int(), [[""]] * len(tokens_BS))


class FakeRank:
    """A rank's model in a fake world that exists already, and its steps."""

    def __init__(
        self,
        job: JobConfig,
        config: ModelConfig,
        counter: FakeCommCounter | None = None,
        *,
        counts_memory: bool = False,
    ) -> None:
        self._job = job
        self._counter = FakeCommCounter() if counter is None else counter
        self.storages = StorageCounter() if counts_memory else None
        """Counts bytes if `counts_memory`, which takes as long as all else."""
        with self._counter, self.storages or nullcontext():
            self.sharded, self.optimizer, self._train_step = build_step(
                job, config, device=CPU, draw_weights=False
            )
        balance_routers(self.sharded)
        self._counter.groups = axes_of_groups(self.sharded.meshes)

    def step(self, num_microbatches: int = 1, batch: Batch | None = None) -> "StepVolumes":
        """Trains on microbatches that are all `batch`; by default an empty one."""
        batch = empty_batch(self._job) if batch is None else batch
        volumes = StepVolumes(self._counter)
        self._counter.clear()
        if self.storages:
            self.storages.most = 0
        with self._counter, self.storages or nullcontext():
            result = self._train_step([batch] * num_microbatches, observer=volumes)
        assert result.accepted, "the step has updated nothing"
        volumes.total = self._counter.volumes()
        return volumes


class StepVolumes(Observer):
    """Holds what a step sends. Observes the step to count its microbatches apart."""

    def __init__(self, counter: CommCounter) -> None:
        self._counter = counter
        self._before: list[dict[Flow, Volume]] = []
        self.total: dict[Flow, Volume] = {}

    def reads(self, batch: Batch, local: LocalBatch) -> None:
        self._before.append(self._counter.volumes())

    def of(self, num_microbatches: int) -> dict[Flow, Volume]:
        """Returns what a step of `num_microbatches` sends if every further one adds what the last
        but one has added."""
        further = num_microbatches - len(self._before)
        if not further:
            return self.total
        assert len(self._before) > 1, "what a further microbatch adds has not been seen"
        # The last two: a pipeline's ranks greet each other at its first run.
        first, second = self._before[-2:]
        found = {}
        for flow, (calls, sent) in self.total.items():
            before, after = (each.get(flow, Volume()) for each in (first, second))
            found[flow] = Volume(
                calls + further * (after.calls - before.calls),
                sent + further * (after.bytes - before.bytes),
            )
        return found


def microbatches_to_run(parallelism: Parallelism) -> int:
    """Returns how many microbatches tell what a further one adds. The first one differs in a
    pipeline, and where parameters stay gathered for all."""
    # "auto" of a CPU keeps none.
    same = parallelism.fsdp_accumulation in ("auto", "reduce_each")
    return 2 if same and parallelism.pipeline_parallel_degree == 1 else 3
