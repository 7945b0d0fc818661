"""Dense feed-forwards with each activation, limits by layer, and sizes."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.support.gated_cases import ACTIVATIONS, plain
from titan_moe.models.decoder import Decoder
from titan_moe.models.feed_forward import FeedForward
from titan_moe.models.registry import model_config
from titan_moe.models.stats import part_flops, part_sizes
from titan_moe.ops.activation import SWIGLU, Activation
from titan_moe.parallelize.activations import values_per_token

D, F = 6, 5
UNGATED = ACTIVATIONS["Nemotron 3"]
GATE = model_config("deepseek_v3", "gate")


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.bfloat16, 0.04)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_dense_feed_forward_equals_its_formula(name: str, dtype: torch.dtype, bound: float):
    torch.manual_seed(0)
    layer, wide = (FeedForward(D, F, ACTIVATIONS[name], gated=True).double() for _ in range(2))
    layer.to(dtype)
    wide.load_state_dict(layer.state_dict())
    x = (20 * torch.randn(2, 3, D)).to(dtype).requires_grad_()
    x_wide = x.detach().double().requires_grad_()
    firsts = [w(x_wide) for w in (wide.w1, wide.w3) if w is not None]
    expected = wide.w2(plain(name, *firsts) * wide.gate(x_wide).sigmoid())
    found = layer(x)
    ours = [found, *torch.autograd.grad(found.sum(), [x, *layer.parameters()])]
    theirs = [expected, *torch.autograd.grad(expected.sum(), [x_wide, *wide.parameters()])]
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= bound * b.norm()
    assert dtype != torch.float64 or torch.autograd.gradcheck(layer, x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_estimate_has_what_a_dense_feed_forward_saves(name: str):
    layer, x, found = FeedForward(8, 16, ACTIVATIONS[name]), torch.randn(1, 8), {}
    known = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters())}

    def pack(x: torch.Tensor) -> torch.Tensor:
        found[x.untyped_storage().data_ptr()] = x
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        layer(x)
    config = replace(GATE, moe=None, hidden_dim=16, activation=ACTIVATIONS[name])
    saved = sum(x.numel() for pointer, x in found.items() if pointer not in known)
    assert saved == values_per_token(config, 0)["feed-forward"]


def test_sizes_and_flops_of_layers_that_are_not_gated_are_those_of_the_model():
    config = replace(GATE, activation=UNGATED, moe=replace(GATE.moe, activation=UNGATED))
    with torch.device("meta"):
        model = Decoder(config)
        w3 = {name: p for name, p in Decoder(GATE).named_parameters() if ".w3" in name}
    parameters = dict(model.named_parameters())
    assert not parameters.keys() & w3.keys()
    assert sum(map(sum, part_sizes(config).values())) == sum(p.numel() for p in model.parameters())
    share = config.moe.top_k / config.moe.num_experts
    met = sum(p.numel() * (share if ".moe.experts." in name else 1) for name, p in w3.items())
    flops = [sum(part_flops(each).values()) for each in (GATE, config)]
    assert flops[0] - flops[1] == pytest.approx(2 * met, rel=1e-12)


def test_limit_holds_in_the_layers_that_are_named():
    clamped = Activation(limit=16.0, clamps="after", limited_in=(2,))
    moe = replace(GATE.moe, activation=replace(clamped, limit=7.0, limited_in=(1, 2)))
    config = replace(GATE, num_layers=4, activation=clamped, moe=moe)
    with torch.device("meta"):
        blocks = Decoder(config).layers.values()
    dense = [block.feed_forward or block.moe.shared_experts for block in blocks]
    after = Activation(limit=16.0, clamps="after")
    assert [each.activation for each in dense] == [SWIGLU, SWIGLU, after, SWIGLU]
    routed = [block.moe and block.moe.experts.compute.activation for block in blocks]
    assert [each and each.limit for each in routed] == [None, 7.0, 7.0, None]
