"""Recompute in every mode gives the gradients of no recompute, and does again only what it says."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.support.operations import Operations
from tests.support.tiers import tiered
from tests.support.tiny import largest_error, make_job, tiny_step
from titan_moe.config.job_config import ActivationCheckpoint
from titan_moe.distributed import activation_checkpoint
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import model_config
from titan_moe.moe.decisions import DecisionMemo
from titan_moe.ops import attention
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
    "full, in halves": {"mode": "full"},
    "full, rows kept": {"mode": "full", "keep_exchanged_rows": True},
    "full, attention kept": {"mode": "full", "keep_attention": True},
    "full, attention kept, compiled": {"mode": "full", "keep_attention": True},
}
FUSED = "aten._scaled_dot_product_flash_attention_for_cpu"


def train_once(family: str, mode: str, ep: int, planted: str | None = None) -> dict:
    """Gradients, counted tokens, and what ran in the forward and in the backward."""

    if planted is not None:
        plant(planted)
    kept: list[torch.Tensor] = []
    keeping = activation_checkpoint.keeping_exchanges

    def noted(keep):
        if keep.__name__ != "keep":
            return keeping(keep)

        def counted(start, x_RD):
            kept.append(received := keep(start, x_RD))
            return received

        return keeping(counted)

    activation_checkpoint.keeping_exchanges = noted
    config = replace(model_config(family, "gate"), num_layers=LAYERS, num_mtp_layers=0)
    degrees = {"expert_parallel_degree": ep, "expert_parallel_overlap": "halves" in mode}
    compiles = {"enable": "compiled" in mode, "backend": "aot_eager"}
    job = make_job(family, parallelism=degrees, activation_checkpoint=MODES[mode], compile=compiles)
    (model,) = tiny_step(job, config)[0].parts

    modes: set[int] = set()
    for moe in model.moe_layers().values():
        moe.experts.register_forward_pre_hook(
            lambda *_: modes.add(torch._C._len_torch_dispatch_stack())
        )

    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, config.vocab_size, (ROWS, SEQ_LEN), generator=generator)
    documents = (torch.arange(SEQ_LEN) >= torch.tensor([[5], [9], [20], [31]])).int()
    with Operations() as forward:
        logits = model(tokens, documents, torch.arange(SEQ_LEN).expand_as(tokens))
        loss = logits.square().sum()
    num_exchanged = len(kept)
    kept.clear()
    with Operations() as backward:
        loss.backward()
    return {
        "grads": {name: p.grad.full_tensor() for name, p in model.named_parameters()},
        "counts": [moe.router.tokens_per_expert for moe in model.moe_layers().values()],
        "forward": forward.calls,
        "backward": backward.calls,
        "kept exchanges": num_exchanged,
        "modes": modes,
        "open exchanges": torch._C._distributed_c10d._get_work_registry_size(),
    }


@cache
def trained(mode: str, family: str = "deepseek_v3", ep: int = 2, bug: str | None = None) -> dict:
    """Returns the findings of the first of two ranks."""
    return run_on_ranks(train_once, 2, family, mode, ep, bug)[0]


def plant(bug: str) -> None:
    if bug == "routed again":
        DecisionMemo.decide = lambda memo, choose, given: choose(given)
    elif bug == "rows of other tokens handed back":
        contexts = activation_checkpoint.kept_exchanges
        keeping = activation_checkpoint.keeping_exchanges

        def shifted():
            with mock.patch.object(activation_checkpoint, "keeping_exchanges", shift):
                return contexts()

        def shift(keep):
            if keep.__name__ == "keep":
                return keeping(keep)
            return keeping(lambda *given: keep(*given).roll(1, 0))

        activation_checkpoint.kept_exchanges = shifted
    elif bug == "nothing kept":
        activation_checkpoint._KEPT.clear()
        activation_checkpoint.kept_exchanges = lambda: (nullcontext(), nullcontext())
    elif bug == "no bug, fused attention":
        attention.MAX_SEQ_LEN = 0


def products(calls: Counter) -> int:
    return sum(calls[name] for name in PRODUCTS)


@pytest.mark.parametrize(
    ("family", "ep"), tiered([("deepseek_v3", 2)], slow=[("deepseek_v3", 1), ("qwen3", 2)])
)
def test_recompute_changes_no_gradient_and_counts_no_token_twice(family: str, ep: int):
    reference = trained("none", family, ep)
    for mode in ("full", "full, in halves", "every second", "op", "full, rows kept"):
        result = trained(mode, family, ep)
        assert largest_error(result["grads"], reference["grads"]) <= 1e-12, mode
        for counts, expected in zip(result["counts"], reference["counts"], strict=True):
            assert torch.equal(counts, expected), mode
            assert counts.sum() == ROWS * SEQ_LEN * 2


@pytest.mark.parametrize("family", tiered(["deepseek_v3"], slow=["qwen3"]))
def test_recompute_by_operation_neither_multiplies_nor_communicates_again(family: str):
    none, full, op = (trained(mode, family) for mode in ("none", "full", "op"))
    assert none["forward"][ATTENTION] == ATTENTION_CALLS * LAYERS
    assert full["backward"][ATTENTION] == none["backward"][ATTENTION] + none["forward"][ATTENTION]
    for name in (ATTENTION, ALL_TO_ALL):
        assert op["backward"][name] == none["backward"][name]
    # Neither the output layer nor the last product of a block, of routed experts or dense.
    again = products(none["forward"]) - 1 - LAYERS
    assert products(full["backward"]) == products(none["backward"]) + again
    assert products(op["backward"]) == products(none["backward"])
    # The rest is computed again: norms, rotations, activations.
    assert op["backward"]["aten.silu"] == full["backward"]["aten.silu"] > 0


@pytest.mark.parametrize("compiled", tiered(["", ", compiled"]))
def test_attention_that_is_kept_is_not_computed_again(compiled: str):
    """Nor does the host pay for a dispatch mode elsewhere in the layer: the test's own is alone."""
    fused = "qwen3", 2, "no bug, fused attention"
    full, kept = trained("full", *fused), trained(f"full, attention kept{compiled}", *fused)
    assert full["forward"][FUSED] == full["backward"][FUSED] == kept["forward"][FUSED] == LAYERS
    assert kept["backward"][FUSED] == 0
    assert kept["backward"][f"{FUSED}_backward"] == LAYERS
    assert largest_error(kept["grads"], full["grads"]) <= 1e-13 * bool(compiled)
    assert kept["modes"] == full["modes"] == {1}


@pytest.mark.parametrize(
    ("mode", "again"), [("full", 2), ("every second", 2), ("full, rows kept", 0), ("op", 0)]
)
def test_rows_are_exchanged_again_on_their_way_to_the_experts_alone(mode: str, again: int):
    """Counts, rows and weights travel to the experts, and outputs back: four all-to-alls a layer,
    and three of gradients. No recomputation runs or keeps the first and the last; `again` are those
    of a layer."""
    result = trained(mode)
    moe_layers, kept = len(result["counts"]), 2 - again
    recomputed = moe_layers if mode != "every second" else 1
    assert result["forward"][ALL_TO_ALL] == 4 * moe_layers
    assert result["backward"][ALL_TO_ALL] == 3 * moe_layers + again * recomputed
    assert result["kept exchanges"] == kept * recomputed


def test_recomputed_halves_send_no_outputs_home_again():
    """Recomputation exchanges rows and weights of both halves; six more exchanges are of
    gradients."""
    result = trained("full, in halves")
    assert result["backward"][ALL_TO_ALL] == (4 + 6) * len(result["counts"])
    assert result["open exchanges"] == 0


def test_planted_bugs_are_seen():
    reference = trained("op")
    for mode in ("op", "full"):
        with pytest.raises(RuntimeError, match=r"changed moe\.rows_sent, moe\.router\.tokens_per"):
            trained(mode, bug="routed again")
    mixed = trained("op", bug="rows of other tokens handed back")
    assert largest_error(mixed["grads"], reference["grads"]) > 1e-3
    forgetful = trained("op", bug="nothing kept")
    assert forgetful["backward"][ALL_TO_ALL] > reference["backward"][ALL_TO_ALL]


@pytest.mark.parametrize(("family", "depths"), [("deepseek_v3", 1), ("gemma4", 0)])
def test_recomputed_layers_change_no_name_and_show_when_printed(family: str, depths: int):
    with torch.device("meta"):
        model = Decoder(replace(model_config(family, "gate"), num_mtp_layers=depths))

    def names() -> list[list[str]]:
        kinds = model.named_parameters(), model.named_buffers(), model.named_modules()
        return [*([name for name, _ in kind] for kind in kinds), list(model.state_dict())]

    before = names()
    activation_checkpoint.apply_activation_checkpoint(model, ActivationCheckpoint(mode="full"))
    assert names() == before
    blocks = model.blocks().values()
    assert str(model).count("Recomputed(") == len(blocks) == model.config.num_layers + depths
    model.load_state_dict(model.state_dict())


def test_torchs_selective_checkpoint_wants_a_recomputation_like_the_forward():
    """Ours has operations more, such as FSDP's gather of experts, and others less, such as the
    exchange of counts, whose decisions are replayed. torch refuses that, or (2.11) hands back the
    result of another operation."""
    x_TD = torch.randn(4, 4, requires_grad=True)
    runs: list[bool] = []

    def layer(x_TD: torch.Tensor) -> torch.Tensor:
        again = bool(runs)
        runs.append(True)
        counts_TD = torch.ones(4, 4) if again else torch.ones(4, 4) @ torch.ones(4, 4)
        gathered_TD = counts_TD.cosh() if again else counts_TD
        return (gathered_TD.detach() * 0 + x_TD.exp() @ x_TD).sin()

    def contexts():
        kept = list(activation_checkpoint._KEPT)
        return create_selective_checkpoint_contexts(kept, allow_cache_entry_mutation=True)

    def gradient(context_fn) -> torch.Tensor:
        runs.clear()
        y_TD = checkpoint(layer, x_TD, use_reentrant=False, context_fn=context_fn)
        return torch.autograd.grad(y_TD.sum(), x_TD)[0]

    expected = torch.autograd.grad((x_TD.exp() @ x_TD).sin().sum(), x_TD)[0]
    try:
        assert not torch.equal(gradient(contexts), expected), "torch's contexts do: use them"
    except RuntimeError as error:
        assert "not found in storage" in str(error)


class Float8Product(torch.autograd.Function):
    """A product in float8, as torchao makes it in a linear layer."""

    @staticmethod
    def forward(ctx, x_TD):
        ctx.save_for_backward(x_TD)
        x, one = x_TD.to(torch.float8_e4m3fn), torch.ones(())
        return torch._scaled_mm(x, x.T, one, one, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad_TT):
        (x_TD,) = ctx.saved_tensors
        return grad_TT @ x_TD


def test_recompute_by_operation_keeps_products_in_float8():
    x_TD = torch.randn(16, 16, requires_grad=True)
    with Operations() as seen:
        y_TT = checkpoint(
            lambda x: Float8Product.apply(x.exp()).square(),
            x_TD,
            use_reentrant=False,
            context_fn=lambda: activation_checkpoint._kept_results(activation_checkpoint._KEPT),
        )
        y_TT.sum().backward()
    assert (seen.calls["aten._scaled_mm"], seen.calls["aten.exp"]) == (1, 2)
