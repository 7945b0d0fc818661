"""A training step lets the host wait for the device at its sums, and once in each MoE layer whose
dispatcher sends as many rows as tokens chose."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.rehearsal.places import here
from tests.support.tiers import split, tiered
from tests.support.tiny import tiny_step
from titan_moe.config.parse import load_job
from titan_moe.models.registry import model_config
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.verify.gradients.fixture import make_batch, own_batches
from titan_moe.verify.layouts.layouts import SEQ_LEN, apply_layout, parse

TOP_K, LAYERS = 4, 3
CONFIG = "configs/debug/gate_qwen3.toml"
SUMS = {"comm/collectives.py:read": 1}
# Their results' sizes depend on values, or they return a Python number: CUDA waits. A tensor's
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
# Operations have kernels of their own on CUDA; a batch lies on the host.
_HOST = ("ops/", "data/", "training/train_step.py:num_local_targets")
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


def waits(name: str, args: tuple, kwargs: dict) -> bool:
    """Tells whether an operation waits for the device to learn how large its result is."""
    if name == "repeat_interleave":
        return isinstance(args[0], Tensor) and kwargs.get("output_size") is None
    if name in _INDEXING:
        chosen = [i for i in args[1] if i is not None]
        return any(index.dtype in (torch.bool, torch.uint8) for index in chosen)
    return name in _WAITS


class Waits(TorchDispatchMode):
    """Counts waits by the function of titan_moe that asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        # These read a CPU tensor's memory without an operation.
        for name in ("tolist", "numpy"):
            setattr(torch.Tensor, name, self._noted(getattr(torch.Tensor, name)))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if waits(func.__name__.partition(".")[0], args, kwargs):
            self._note()
        return func(*args, **kwargs)

    def _note(self) -> None:
        where = here().where
        if not where.startswith(_HOST):
            self.places[where] += 1

    def _noted(self, read: Any) -> Any:
        def reads(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._note()
            return read(tensor, *args, **kwargs)

        return reads


def train_on_rank(layout: str, tables: dict[str, Any], planted: str | None) -> Counter[str]:
    """Returns the waits of the second step, which has one microbatch."""
    own = parse(layout)
    job = apply_layout(load_job(["--job.config_file", CONFIG]), own, tables)
    # Products in float64 are a loop over experts, which reads where each one's rows end.
    training = {"dtype": "float32", "mixed_precision_param": "float32"}
    job, config = job.with_values(training=training), model_config("qwen3", "gate")
    assert config.moe is not None
    config = replace(config, num_layers=LAYERS, moe=replace(config.moe, top_k=TOP_K))
    sharded, step = tiny_step(job, config)
    if planted is not None:
        for moe in sharded.moe_layers().values():
            moe.dispatcher.send_home = partial(_sent_wrongly, moe.dispatcher.send_home, planted)
    batch = make_batch(job.training.global_batch_size, SEQ_LEN, config.vocab_size, seed=1)
    place = sharded.meshes.dims.coordinate(sharded.meshes.rank, "batch")
    batches = own_batches(batch, job.training.local_batch_size, place, own.data_ranks)
    step(batches[:1])
    seen = Waits()
    with seen:
        step(batches[:1])
    return seen.places


def _sent_wrongly(send_home: Callable[..., Any], bug: str, y_RD: Tensor, route: Any) -> Any:
    if bug == "a truth is asked for":
        y_RD = y_RD * bool(torch.ones(()) != 0)
    elif bug == "rows chosen by a mask":
        y_RD = y_RD[torch.ones(len(y_RD), dtype=torch.bool)]
    else:  # A gradient is read.
        y_RD.register_hook(lambda grad: grad * (grad.new_ones(()).item() == 1))
    return send_home(y_RD, route)


def count(
    layout: str, planted: str | None = None, tables: dict[str, Any] | None = None
) -> Counter[str]:
    """Returns the waits by place, which must be the same on all ranks."""
    world_size = parse(layout).world_size
    first, *others = run_on_ranks(train_on_rank, world_size, layout, tables or {}, planted)
    assert all(other == first for other in others)
    return first


WAYS = [*product(["standard", "deduplicated", "nodes", "balanced"], ["none", "full", "op"])]


@pytest.mark.parametrize(
    "dispatch, recompute",
    split(WAYS, [("standard", "full"), ("deduplicated", "op"), ("balanced", "full")]),
)
def test_a_moe_layer_waits_for_the_device_once_and_not_in_recompute_or_backward(
    dispatch: str, recompute: str
):
    degrees = "dp_shard=4,ep=4" if dispatch == "nodes" else "dp_shard=2,ep=2"
    places = {"standard": "all_to_all.py:plan", "balanced": "balanced.py:_plan"}
    place = places.get(dispatch, "deduplicated.py:plan")
    seen = count(f"{degrees},dispatch={dispatch},recompute={recompute}")
    assert seen == {**SUMS, f"moe/dispatch/{place}": LAYERS}


_DROPPED = {"expert_parallel_capacity_factor": 1.1, "expert_parallel_overflow": "drop"}


@pytest.mark.parametrize(
    "layout, tables",
    tiered(
        [
            ("dp_shard=1", {}),
            ("dp_shard=2,ep=2,dispatch=bounded,recompute=full", {}),
            ("dp_shard=2,ep=2", {"parallelism": _DROPPED}),
        ],
        slow=[
            ("tp=2,etp=2,recompute=full", {}),
            ("tp=2,etp=2,dispatch=deduplicated,recompute=full", {}),
            ("dp_shard=2,tp=2,ep=2,etp=2,dispatch=bounded,recompute=full", {}),
        ],
    ),
)
def test_moe_layers_do_not_wait_without_ep_or_with_bounded_buffers(layout: str, tables: dict):
    assert count(layout, tables=tables) == SUMS


@pytest.mark.parametrize(
    "bug", tiered(["a truth is asked for"], slow=["rows chosen by a mask", "a gradient is read"])
)
def test_a_planted_wait_for_the_device_is_counted(bug: str):
    assert sum(count("dp_shard=1", bug).values()) >= LAYERS + 1
