"""A layer whose dispatcher waits for nothing is compiled as one graph, exchanges included."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.tiers import tiered
from titan_moe.config.job_config import ActivationCheckpoint, Compile
from titan_moe.models.registry import model_config
from titan_moe.runtime.ranks import run_on_ranks

ROWS, SEQ_LEN = 2, 48
NONE = ActivationCheckpoint(mode="none")
BY_OPERATION = ActivationCheckpoint(mode="selective", selective_ac_option="op")


class Trained(NamedTuple):
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]
    """Telemetry of both layers."""
    graphs: int
    breaks: list[str]
    exchanges: list[int]
    """All-to-alls in the forward and in the backward."""
    overlapped: list[int]
    """Products between the start of an exchange and the next wait, likewise."""


def train_once(
    family: str, dispatch: str, recompute: ActivationCheckpoint, backend: str | None, planted: bool
) -> Trained:
    """Two layers, of which the second has experts, on this rank's rows; gradients are not summed
    over ranks."""
    from torch._dynamo.utils import counters
    from torch.utils._python_dispatch import TorchDispatchMode

    from titan_moe.distributed.compile import apply_compile
    from titan_moe.distributed.dtensor import local_part
    from titan_moe.distributed.expert_parallel import DispatchOptions, apply_expert_parallel
    from titan_moe.distributed.parallel_dims import ParallelDims
    from titan_moe.models.decoder import Decoder
    from titan_moe.moe.dispatch.capacity import CapacityDispatcher
    from titan_moe.ops.attention import CausalSdpa

    class Exchanges(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls.append(func.name().rpartition("::")[2])
            return func(*args, **(kwargs or {}))

    if planted:
        first_come = CapacityDispatcher._first_come

        def asking(self, rank_TK: Tensor, sent_P: Tensor, capacity: int) -> Tensor:
            return first_come(self, rank_TK, sent_P, min(capacity, int(sent_P.max().item())))

        CapacityDispatcher._first_come = asking  # type: ignore[method-assign]
    world_size = dist.get_world_size()
    config = replace(model_config(family, "gate"), num_layers=2, num_mtp_layers=0)
    model = Decoder(config, CausalSdpa()).double()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    meshes = ParallelDims(world_size=world_size, ep=world_size).build_mesh("cpu")
    options = DispatchOptions(dispatch, capacity_factor=0.7)
    apply_expert_parallel(list(model.moe_layers().values()), meshes, options)
    section = Compile(enable=backend is not None, backend=backend or "eager")
    apply_compile(dict(model.layers.items()), section, recompute, eager_attention=False)

    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, config.vocab_size, (ROWS, SEQ_LEN), generator=generator)
    positions = torch.arange(SEQ_LEN).expand_as(tokens)
    forward, backward = Exchanges(), Exchanges()
    with forward:
        loss = model(tokens, torch.zeros_like(tokens), positions).square().sum()
    with backward:
        loss.backward()
    return Trained(
        {name: local_part(p.grad) for name, p in model.named_parameters() if p.grad is not None},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
        counters["stats"]["unique_graphs"],
        list(counters["graph_break"]),
        [ran.calls.count("all_to_all_single") for ran in (forward, backward)],
        [_overlapped(ran.calls) for ran in (forward, backward)],
    )


def _overlapped(calls: list[str]) -> int:
    products, under_way = 0, False
    for name in calls:
        if name in ("all_to_all_single", "wait_tensor"):
            under_way = name == "all_to_all_single"
        products += under_way and name == "mm"
    return products


def train(
    family: str,
    ep: int,
    recompute: ActivationCheckpoint = NONE,
    backend: str | None = "aot_eager",
    *,
    planted: bool = False,
) -> Trained:
    dispatch = "capacity" if ep > 1 else "standard"
    trained, *_ = run_on_ranks(train_once, ep, family, dispatch, recompute, backend, planted)
    return trained


@pytest.mark.parametrize(
    ("family", "ep"),
    tiered(
        [],
        slow=[("deepseek_v3", 2), ("deepseek_v3", 1)],
        full=[("qwen3", 2), ("gpt_oss", 2), ("llama4", 2), ("mixtral", 1)],
    ),
)
def test_a_layer_is_one_graph_and_trains_the_same(family: str, ep: int):
    expected = train(family, ep, backend=None)
    assert ep == 1 or expected.buffers["layers.1.moe.rows_dropped"] > 0
    config = model_config(family, "gate")
    assert config.moe is not None
    exchanging = sum(map(config.is_moe_layer, range(2))) if ep > 1 else 0
    for recompute in (NONE, BY_OPERATION):
        compiled = train(family, ep, recompute)
        assert (compiled.graphs, compiled.breaks) == (_num_kinds(family), [])
        for name, grad in compiled.grads.items():
            torch.testing.assert_close(grad, expected.grads[name], rtol=1e-12, atol=1e-12)
        for name, buffer in compiled.buffers.items():
            assert torch.equal(buffer, expected.buffers[name]), name
        # Rows, weights and outputs; in a graph the counts' exchange is of this kind too.
        assert expected.exchanges == [3 * exchanging, 3 * exchanging]
        assert compiled.exchanges == [4 * exchanging, 3 * exchanging]
        if exchanging and config.moe.num_shared_experts:
            assert min(compiled.overlapped) >= 3  # The shared experts' products.


def _num_kinds(family: str) -> int:
    """Layers of one kind are compiled once."""
    config = model_config(family, "gate")
    return len({(config.is_moe_layer(layer), config.local_in(layer)) for layer in range(2)})
