"""Recompute by operation in compiled layers: the same gradients, no product made again, and less
kept than without."""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.support.operations import Operations
from tests.support.tiers import tiered
from titan_moe.config.job_config import ActivationCheckpoint, Compile
from titan_moe.distributed.compile import apply_compile
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import model_config
from titan_moe.ops.attention import Sdpa

ROWS, SEQ_LEN = 2, 48
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "titan_moe.grouped_mm")


class Trained(NamedTuple):
    grads: dict[str, Tensor]
    backward: Counter[str]
    """Number of calls by operation."""
    kept_bytes: int
    """Bytes that the forward left for the backward, without parameters."""


def products(calls: Counter[str]) -> int:
    return sum(n for name, n in calls.items() if name.startswith(PRODUCTS))


def train_once(family: str, *, compiled: bool = True, by_operation: bool = False) -> Trained:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = replace(model_config(family, "gate"), num_layers=2, num_mtp_layers=0)
    model = Decoder(config, Sdpa()).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    section = Compile(enable=compiled, backend="aot_eager")
    mode = "selective" if by_operation else "none"
    recompute = ActivationCheckpoint(mode=mode, selective_ac_option="op")
    apply_compile(model.layers.values(), section, recompute)
    tokens = torch.randint(0, config.vocab_size, (ROWS, SEQ_LEN))
    positions = torch.arange(SEQ_LEN).expand_as(tokens)
    kept = {p.data_ptr(): 0 for p in model.parameters()}

    def note(x: Tensor) -> Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
        return x

    with saved_tensors_hooks(note, lambda x: x):
        loss = model(tokens, torch.zeros_like(tokens), positions).square().sum()
    with Operations() as backward:
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Trained(grads, backward.calls, sum(kept.values()))


@pytest.mark.slow
@pytest.mark.parametrize("family", tiered(["deepseek_v3"], slow=["gpt_oss", "llama4"]))
def test_graphs_make_no_product_again_and_keep_less(family: str):
    expected = train_once(family, compiled=False).grads
    by_default = train_once(family)
    results = train_once(family, by_operation=True)
    for name, grad in results.grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-11, atol=1e-11)
    assert results.backward["aten.pow"] > by_default.backward["aten.pow"]  # Norms.
    assert products(results.backward) == products(by_default.backward)
    assert results.kept_bytes < 0.9 * by_default.kept_bytes


@pytest.mark.slow
def test_torchs_aggressive_recomputation_chooses_experts_and_multiplies_again():
    by_default = train_once("deepseek_v3")
    with torch._functorch.config.patch(aggressive_recomputation=True):
        aggressive = train_once("deepseek_v3")
    assert products(aggressive.backward) > products(by_default.backward)
    assert aggressive.backward["aten.topk"] > by_default.backward["aten.topk"] == 0
