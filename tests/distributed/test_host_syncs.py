"""How often an MoE layer lets the host wait for the device: counted from below, forward, backward
and in recomputation."""

from collections import Counter
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.tiers import split, tiered
from titan_moe.config.parse import load_job
from titan_moe.ops import move_rows
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.verify.gradients.fixture import make_rows
from titan_moe.verify.gradients.worker import own_batches
from titan_moe.verify.layouts.layouts import SEQ_LEN, apply_layout, num_rows, parse, with_tables

TOP_K, LAYERS = 4, 3
CONFIG = "configs/debug/gate_qwen3.toml"
# What the size of the result depends on, or a Python number: CUDA would wait for either. A tensor's
# truth, item() and int() are the first.
_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "nonzero_numpy",
    "masked_select",
    "unique_dim",
    "unique_consecutive",
    "_unique",
    "_unique2",
    "bincount",
    "is_nonzero",
    "equal",
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


def waits(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether an operation waits for the device to learn how large its result is."""
    if name == "repeat_interleave":
        return isinstance(args[0], Tensor) and kwargs.get("output_size") is None
    if name in _INDEXING:
        chosen = [i for i in args[1] if i is not None]
        return any(index.dtype in (torch.bool, torch.uint8) for index in chosen)
    return name in _WAITS


class Border(torch.autograd.Function):
    """Tells a counter which phase begins here, in the forward and in the backward."""

    @staticmethod
    def forward(ctx, x, counter, before, after):
        ctx.counter, ctx.after = counter, after
        counter.phase = before
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.counter.phase = ctx.after
        return grad, None, None, None


class Waits:
    """Counts them by phase, between the borders of MoE layers."""

    def __init__(self) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        counter = self
        self.phase: str | None = None
        self.seen: Counter[str] = Counter()

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                kwargs = kwargs or {}
                if waits(func.__name__.partition(".")[0], args, kwargs):
                    counter.see()
                return func(*args, **kwargs)

        self.mode = Mode()
        # These read a CPU tensor's memory without an operation.
        for name in ("tolist", "numpy"):
            setattr(torch.Tensor, name, self._seen(getattr(torch.Tensor, name)))
        # On CUDA these are one Triton kernel each; in plain torch they look for padding.
        for name in ("copy_rows_reference", "add_rows_reference"):
            setattr(move_rows, name, self._unseen(getattr(move_rows, name)))

    def see(self) -> None:
        if self.phase is not None:
            inside = torch._C._current_graph_task_id() != -1
            again = self.phase == "forward" and inside
            self.seen["recompute" if again else self.phase] += 1

    def _seen(self, read: Any) -> Any:
        def reads(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.see()
            return read(tensor, *args, **kwargs)

        return reads

    def _unseen(self, move: Any) -> Any:
        def moves(*args: Any) -> Tensor:
            outside, self.phase = self.phase, None
            try:
                return move(*args)
            finally:
                self.phase = outside

        return moves

    def around(self, forward: Any) -> Any:
        def marked(x: Tensor) -> Tensor:
            outside = self.phase  # Of a recomputation: it is amid the backward.
            try:
                y = forward(Border.apply(x, self, "forward", None))
                return Border.apply(y, self, None, "backward")
            finally:
                self.phase = outside

        return marked


class Task(NamedTuple):
    layout: str
    tables: dict[str, dict[str, Any]]
    planted: str | None = None


def train_on_rank(task: Task) -> Counter:
    """A microbatch; what was seen of all layers."""
    from dataclasses import replace

    from titan_moe.distributed.parallelize import build_sharded_model
    from titan_moe.models.registry import model_config
    from titan_moe.train_step import local_batch

    layout, cpu = parse(task.layout), torch.device("cpu")
    job = apply_layout(load_job(["--job.config_file", CONFIG]), layout, task.tables)
    # Products in float64 are a loop over experts, which reads where each one's rows end.
    training = {"dtype": "float32", "mixed_precision_param": "float32"}
    job, config = with_tables(job, {"training": training}), model_config("qwen3", "gate")
    assert config.moe is not None
    config = replace(config, num_layers=LAYERS, moe=replace(config.moe, top_k=TOP_K))
    sharded = build_sharded_model(job, config, device=cpu, world_size=layout.world_size)
    seen = Waits()
    for moe in sharded.moe_layers().values():
        plant(moe, task.planted)
        moe.forward = seen.around(moe.forward)
    rows = make_rows(num_rows(layout), SEQ_LEN, config.vocab_size, seed=1)
    place = sharded.meshes.dims.coordinate(sharded.meshes.rank, "batch")
    batches = own_batches(rows, job.training.local_batch_size, place, layout.data_ranks)
    with seen.mode:
        sharded.execution.train(local_batch(batches[0], sharded, cpu))
    return seen.seen


def plant(moe: Any, bug: str | None) -> None:
    combine = moe.dispatcher.combine

    def truth(y_RD: Tensor, plan: Any) -> Tensor:
        return combine(y_RD * bool(torch.ones(()) != 0), plan)

    def masked(y_RD: Tensor, plan: Any) -> Tensor:
        return combine(y_RD[torch.ones(len(y_RD), dtype=torch.bool)], plan)

    def watched(y_RD: Tensor, plan: Any) -> Tensor:
        y_RD.register_hook(lambda grad: grad * (grad.new_ones(()).item() == 1))
        return combine(y_RD, plan)

    wrong = {
        "a truth is asked for": truth,
        "rows chosen by a mask": masked,
        "a gradient is read": watched,
    }
    if bug is not None:
        moe.dispatcher.combine = wrong[bug]


def count(layout: str, planted: str | None = None, **parallelism: Any) -> Counter:
    """What the ranks saw, which must be the same for all."""
    task = Task(layout, {"parallelism": parallelism}, planted)
    first, *others = run_on_ranks(train_on_rank, parse(layout).world_size, task)
    assert all(other == first for other in others)
    return first


WAYS = [*product(["standard", "deduplicated", "nodes"], ["none", "full", "op"])]


@pytest.mark.parametrize(
    "dispatch, recompute", split(WAYS, [("standard", "full"), ("deduplicated", "op")])
)
def test_a_layer_waits_once_in_the_forward_and_never_again(dispatch: str, recompute: str):
    degrees = "dp_shard=4,ep=4" if dispatch == "nodes" else "dp_shard=2,ep=2"
    seen = count(f"{degrees},dispatch={dispatch},recompute={recompute}")
    assert seen == {"forward": LAYERS}


@pytest.mark.parametrize(
    "layout", tiered(["dp_shard=1"], slow=["tp=2,etp=2", "tp=2,etp=2,dispatch=deduplicated"])
)
def test_without_expert_parallelism_nothing_waits(layout: str):
    assert not count(f"{layout},recompute=full")


@pytest.mark.parametrize("layout", tiered(["dp_shard=2,ep=2"], slow=["dp_shard=2,tp=2,ep=2,etp=2"]))
def test_bounded_buffers_wait_for_nothing(layout: str):
    assert not count(f"{layout},dispatch=bounded,recompute=full")
    assert not count(layout, expert_parallel_capacity_factor=1.1, expert_parallel_overflow="drop")


@pytest.mark.parametrize(
    "bug, where",
    tiered(
        [("a truth is asked for", "forward")],
        slow=[("rows chosen by a mask", "forward"), ("a gradient is read", "backward")],
    ),
)
def test_a_planted_wait_is_seen(bug: str, where: str):
    seen = count("dp_shard=2,ep=2,recompute=full", bug)
    assert seen[where] >= LAYERS + (where == "forward")
