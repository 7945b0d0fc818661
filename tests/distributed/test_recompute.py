"""Recompute in every mode gives the gradients of no recompute, and does again only what it says."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.tiers import tiered
from titan_moe.config.job_config import ActivationCheckpoint
from titan_moe.distributed.activation_checkpoint import apply_activation_checkpoint
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import model_config
from titan_moe.moe.balance import attach_loss
from titan_moe.runtime.ranks import run_on_ranks

ROWS, SEQ_LEN, LAYERS = 4, 32, 3
PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm", "titan_moe.grouped_mm"}
# The CPU's attention takes a row of 32 tokens in two blocks of queries, each in two products.
ATTENTION, ATTENTION_CALLS = "aten.bmm", 4
ALL_TO_ALL = "_c10d_functional.all_to_all_single"
MODES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "every second": {"mode": "selective", "selective_ac_option": "2"},
    "op": {"mode": "selective", "selective_ac_option": "op"},
    "full": {"mode": "full"},
    "full, rows kept": {"mode": "full", "keep_exchanged_rows": True},
}


def train_once(family: str, mode: str, ep: int, planted: str | None = None) -> dict:
    """Gradients, counted tokens, and what ran in the forward and in the backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from titan_moe.distributed import activation_checkpoint
    from titan_moe.distributed.expert_parallel import apply_expert_parallel
    from titan_moe.distributed.fsdp import ShardingPolicy, apply_fsdp
    from titan_moe.distributed.init_weights import fill_initial_weights
    from titan_moe.distributed.parallel_dims import ParallelDims
    from titan_moe.models.decoder import initial_std, move_off_meta, stage_units
    from titan_moe.ops.attention import DocumentSdpa

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: Counter[str] = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls[str(func).rpartition(".")[0]] += 1
            return func(*args, **(kwargs or {}))

    if planted is not None:
        plant(planted)
    kept: list[activation_checkpoint._Keep] = []
    begin = activation_checkpoint._Keep.__enter__

    def noted(self):
        kept.append(self)
        return begin(self)

    activation_checkpoint._Keep.__enter__ = noted
    config = replace(model_config(family, "gate"), num_layers=LAYERS, num_mtp_layers=0)
    assert config.moe is not None
    config = replace(config, moe=replace(config.moe, row_alignment=16))
    meshes = ParallelDims(world_size=dist.get_world_size(), ep=ep).build_mesh("cpu")
    with torch.device("meta"):
        model = Decoder(config, DocumentSdpa()).double()
    apply_expert_parallel(list(model.moe_layers().values()), meshes)
    section = ActivationCheckpoint(**MODES[mode])
    activation_checkpoint.apply_activation_checkpoint(dict(model.layers.items()), section)
    policy = ShardingPolicy(
        stored_dtype=torch.float64,
        compute_dtype=torch.float64,
        reduce_dtype=torch.float64,
        reshard_after_forward=True,
        reshard_last=True,
        cpu_offload=False,
    )
    apply_fsdp(model, stage_units(model), meshes, policy)
    move_off_meta(model, torch.device("cpu"), parameter_device=torch.device("cpu"))
    fill_initial_weights(model, 0, lambda name: initial_std(name, config))

    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, config.vocab_size, (ROWS, SEQ_LEN), generator=generator)
    documents = (torch.arange(SEQ_LEN) >= torch.tensor([[5], [9], [20], [31]])).int()
    forward, backward = Count(), Count()
    with forward:
        logits = model(tokens, documents, torch.arange(SEQ_LEN).expand_as(tokens))
        loss = logits.square().sum()
    exchanges = [rows for one in kept for op, rows in one.kept.items() if is_exchange(op)]
    num_exchanged = sum(map(len, exchanges))
    with backward:
        loss.backward()
    return {
        "grads": {name: p.grad.full_tensor() for name, p in model.named_parameters()},
        "counts": [moe.router.tokens_per_expert for moe in model.moe_layers().values()],
        "forward": forward.calls,
        "backward": backward.calls,
        "kept exchanges": num_exchanged,
    }


def is_exchange(operation: object) -> bool:
    return str(operation).startswith(ALL_TO_ALL)


def plant(bug: str) -> None:
    from titan_moe.distributed import activation_checkpoint
    from titan_moe.moe.layer import RoutingMemo

    if bug == "routed again":
        RoutingMemo._replay = RoutingMemo._record
    elif bug == "rows of other tokens handed back":
        hand_back = activation_checkpoint._HandBack.__torch_dispatch__

        def shifted(self, func, types, args=(), kwargs=None):
            if is_exchange(func):
                self.kept[func][0] = self.kept[func][0].roll(1, 0)
            return hand_back(self, func, types, args, kwargs)

        activation_checkpoint._HandBack.__torch_dispatch__ = shifted
    elif bug == "nothing kept":
        activation_checkpoint._KEPT.clear()


def distance(result: dict, reference: dict) -> float:
    """The largest relative difference of a gradient."""
    return max(
        ((grad - reference["grads"][name]).norm() / reference["grads"][name].norm()).item()
        for name, grad in result["grads"].items()
    )


def products(calls: Counter) -> int:
    return sum(calls[name] for name in PRODUCTS)


@pytest.mark.parametrize(
    ("family", "ep"), tiered([("deepseek_v3", 2)], slow=[("deepseek_v3", 1), ("qwen3", 2)])
)
def test_recompute_changes_no_gradient_and_counts_no_token_twice(family: str, ep: int):
    reference, *_ = run_on_ranks(train_once, 2, family, "none", ep)
    for mode in ("full", "every second", "op", "full, rows kept"):
        result, *_ = run_on_ranks(train_once, 2, family, mode, ep)
        assert distance(result, reference) <= 1e-12, mode
        for counts, expected in zip(result["counts"], reference["counts"], strict=True):
            assert torch.equal(counts, expected), mode
            assert counts.sum() == ROWS * SEQ_LEN * 2


@pytest.mark.parametrize("family", tiered(["deepseek_v3"], slow=["qwen3"]))
def test_recompute_by_operation_neither_multiplies_nor_communicates_again(family: str):
    none, full, op = (
        run_on_ranks(train_once, 2, family, mode, 2)[0] for mode in ("none", "full", "op")
    )
    moe_layers = len(none["counts"])
    assert none["forward"][ATTENTION] == ATTENTION_CALLS * LAYERS
    assert full["backward"][ATTENTION] == none["backward"][ATTENTION] + none["forward"][ATTENTION]
    for name in (ATTENTION, ALL_TO_ALL):
        assert op["backward"][name] == none["backward"][name]
    # Not the output layer, and not the last product of a block where it is the last operation.
    again = products(none["forward"]) - 1 - (LAYERS - moe_layers)
    assert products(full["backward"]) == products(none["backward"]) + again
    assert products(op["backward"]) == products(none["backward"])
    # The rest is computed again: norms, rotations, activations.
    assert op["backward"]["aten.silu"] == full["backward"]["aten.silu"] > 0


@pytest.mark.parametrize(
    ("mode", "again"), [("full", 2), ("every second", 2), ("full, rows kept", 0), ("op", 0)]
)
def test_rows_are_exchanged_again_on_their_way_to_the_experts_alone(mode: str, again: int):
    """Rows and weights travel to the experts, and outputs back: three all-to-alls a layer, and
    three of gradients. No recomputation runs or keeps the last; `again` are those of a layer."""
    result, *_ = run_on_ranks(train_once, 2, "deepseek_v3", mode, 2)
    moe_layers, kept = len(result["counts"]), 2 - again
    recomputed = moe_layers if mode != "every second" else 1
    assert result["forward"][ALL_TO_ALL] == 3 * moe_layers
    assert result["backward"][ALL_TO_ALL] == 3 * moe_layers + again * recomputed
    assert result["kept exchanges"] == kept * recomputed


def test_planted_bugs_are_seen():
    reference, *_ = run_on_ranks(train_once, 2, "deepseek_v3", "op", 2)
    for mode in ("op", "full"):
        with pytest.raises(RuntimeError, match=r"changed moe\.rows_sent, moe\.router\.tokens_per"):
            run_on_ranks(train_once, 2, "deepseek_v3", mode, 2, "routed again")
    mixed, *_ = run_on_ranks(
        train_once, 2, "deepseek_v3", "op", 2, "rows of other tokens handed back"
    )
    assert distance(mixed, reference) > 1e-3
    forgetful, *_ = run_on_ranks(train_once, 2, "deepseek_v3", "op", 2, "nothing kept")
    assert forgetful["backward"][ALL_TO_ALL] > reference["backward"][ALL_TO_ALL]


class Counting(torch.nn.Module):
    """A block with a device metric: the sum of its inputs."""

    def __init__(self, in_the_backward: bool) -> None:
        super().__init__()
        self.in_the_backward = in_the_backward
        self.attention = torch.nn.Module()
        self.attention.core = torch.sin
        self.register_buffer("total", torch.zeros((), dtype=torch.float64), persistent=False)
        self.execute = self.compute

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_the_backward:
            x = attach_loss(x, x.sum().detach(), self.total)
        else:
            self.total += x.sum().detach()
        return (2 * x).sin()


def counted(mode: str, *, in_the_backward: bool) -> tuple[float, torch.Tensor]:
    """The metric, and the gradient, of the inputs 0 to 3."""
    block, x = Counting(in_the_backward), torch.arange(4.0, requires_grad=True)
    section = ActivationCheckpoint(**MODES[mode])
    apply_activation_checkpoint({"0": block}, section)
    block.execute(x).sum().backward()
    assert x.grad is not None
    return block.total.item(), x.grad


@pytest.mark.parametrize("mode", MODES)
def test_a_device_metric_that_is_added_in_the_backward_counts_once(mode: str):
    total, grad = counted(mode, in_the_backward=True)
    assert total == 6
    torch.testing.assert_close(grad, 2 * (2 * torch.arange(4.0)).cos())


@pytest.mark.parametrize("mode", ["full", "op"])
def test_a_device_metric_that_is_added_in_a_recomputed_forward_is_refused(mode: str):
    with pytest.raises(RuntimeError, match="a recomputed forward changed total, which would count"):
        counted(mode, in_the_backward=False)
