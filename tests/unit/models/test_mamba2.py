"""Mamba-2's layers against the paper's recurrence, their initial values, costs."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from tests.support.packing import filled, train_packed_and_alone
from titan_moe.distributed.init_weights import fill_initial_weights
from titan_moe.models.decoder import Decoder, initial_std, is_bias
from titan_moe.models.mamba2 import Mamba2
from titan_moe.models.recurrent_config import Mamba2Config
from titan_moe.models.registry import model_config
from titan_moe.models.stats import attention_stats
from titan_moe.ops.attention import Sdpa
from titan_moe.ops.gated_delta import Recurrence, chunked_rule
from titan_moe.verify.gradients.cores import recur_additively

GATE = model_config("nemotron_h", "gate")
DIM, EPS = 12, 1e-5
CONFIG = Mamba2Config(
    num_key_heads=2, num_value_heads=6, key_dim=5, value_dim=4, conv_size=3, time_step_min=0.5
)


def _layer(config: Mamba2Config = CONFIG) -> Mamba2:
    core = Recurrence(chunked_rule, mask_documents=True)
    layer = Mamba2(DIM, config, norm_eps=EPS, core=core).double()
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def _one_token_after_another(layer: Mamba2, x_SD: Tensor) -> Tensor:
    """The layer on one document, by its parameters: sections 2 and 7 of arXiv 2405.21060."""
    config, weights = layer.config, dict(layer.named_parameters())
    heads, keys, values = config.num_value_heads, config.key_dim, config.value_dim
    each = heads // config.num_key_heads
    projected = {n: x_SD @ weights[f"in_proj.{n}.weight"].T for n in "qkvz"}
    dt_SH = F.softplus(x_SD @ weights["gates.dt.weight"].T + weights["decay.dt_bias.weight"])
    dt_SH = dt_SH.where(dt_SH > config.time_step_min, config.time_step_min)
    rate_H = -weights["decay.A_log.weight"].exp()
    state = x_SD.new_zeros(heads, values, keys)
    outputs = []
    for t in range(len(x_SD)):
        mixed = {}
        for n in "qkv":
            weight = weights[f"conv.{n}.weight"]
            total = weights[f"conv_bias.{n}.weight"]
            for back in range(min(t + 1, config.conv_size)):
                total = total + weight[:, 0, -1 - back] * projected[n][t - back]
            mixed[n] = F.silu(total)
        c, b = (mixed[n].view(-1, keys) for n in "qk")
        x, y = mixed["v"].view(heads, values), []
        decayed = []
        for head in range(heads):
            dt, group = dt_SH[t, head], head // each
            added = dt * torch.outer(x[head], b[group])
            decayed.append((dt * rate_H[head]).exp() * state[head] + added)
            y.append(decayed[-1] @ c[group] + weights["decay.D.weight"][head] * x[head])
        state = torch.stack(decayed)
        gated = torch.cat(y) * F.silu(projected["z"][t])
        groups = gated.view(config.num_key_heads, -1)
        normed = groups / (groups.square().mean(-1, keepdim=True) + EPS).sqrt()
        scaled = normed.flatten() * weights["out_norm.scale.weight"]
        outputs.append(weights["out_proj.weight"] @ scaled)
    return torch.stack(outputs)


@pytest.mark.parametrize("lengths", [(2,), (37,), (1, 2, 17, 20, 3)])
def test_mamba2_equals_one_token_after_another_in_each_document(lengths: tuple[int, ...]):
    layer = _layer()
    x_SD = torch.randn(sum(lengths), DIM, dtype=torch.float64, requires_grad=True)
    wanted = torch.cat([_one_token_after_another(layer, part) for part in x_SD.split(lengths)])
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    found = layer(x_SD[None], None, layer.core.mask(number))[0]
    upstream, leaves = torch.randn_like(found), [x_SD, *layer.parameters()]
    assert (found - wanted).norm() <= 1e-13 * wanted.norm()
    ours, theirs = (torch.autograd.grad(y, leaves, upstream) for y in (found, wanted))
    for mine, other in zip(ours, theirs, strict=True):
        assert other.norm() > 0 and (mine - other).norm() <= 1e-12 * other.norm()


def test_packed_documents_of_one_part_layers_are_trained_as_one_by_one():
    def model(masked: bool) -> Decoder:
        recurrence = Recurrence(chunked_rule, mask_documents=masked)
        return filled(GATE, Sdpa(mask_documents=masked), recurrence).eval()

    packed = model(True)
    train_packed_and_alone(packed, model(False), (1, 2, 17, 70, 6))
    parts = [(b.attention is not None, b.moe is not None) for b in packed.layers.values()]
    assert parts[:6] == [*[(True, False), (False, True)] * 2, (True, False), (False, False)]
    assert packed.layers["5"].feed_forward is not None and GATE.num_residuals == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mamba2_in_16_bits_is_near_float64(dtype: torch.dtype):
    layer, x_BSD = _layer(), torch.randn(2, 40, DIM, dtype=torch.float64)
    mask = layer.core.mask(torch.zeros(2, 40, dtype=torch.int64))
    wanted = layer(x_BSD, None, mask)
    found = layer.to(dtype)(x_BSD.to(dtype), None, mask)
    assert found.dtype == dtype
    assert (found - wanted).norm() <= (0.02 if dtype == torch.bfloat16 else 0.003) * wanted.norm()


def test_mamba2_without_bias_of_its_convolution_has_no_such_parameters():
    without = dict(_layer(replace(CONFIG, conv_bias=False)).named_parameters())
    added = {f"attention.{name}" for name, _ in _layer().named_parameters() if name not in without}
    assert len(added) == 3 and all(map(is_bias, added))


def test_mamba2_starts_with_published_values():
    recurrent = replace(CONFIG, num_key_heads=1, num_value_heads=500, time_step_min=0.001)
    config = replace(model_config("qwen3_next", "gate"), recurrent=recurrent)
    layer = Mamba2(DIM, recurrent, norm_eps=EPS, core=Recurrence(chunked_rule, mask_documents=True))
    fill_initial_weights(layer, 0, lambda name: initial_std(f"attention.{name}", config))
    weights = dict(layer.named_parameters())
    rate, step = weights["decay.A_log.weight"].exp(), F.softplus(weights["decay.dt_bias.weight"])
    assert ((rate > 1) & (rate < 16)).all() and rate.max() > 14 and rate.min() < 2
    assert ((step > 0.00099) & (step < 0.1001)).all() and 0.008 < step.log().mean().exp() < 0.0125
    assert step.max() > 0.097  # The logarithm alone, without softplus's inverse, ends at 0.0953.
    for name in ("decay.D.weight", "out_norm.scale.weight"):
        assert (weights[name] == 1).all()
    assert (weights["conv_bias.k.weight"] == 0).all()


def test_mamba2_keeps_as_much_for_the_backward_as_is_estimated():
    config = Mamba2Config(2, 16, 64, 32, conv_size=4)
    layer, x_BSD = _layer(config).bfloat16(), torch.randn(1, 512, DIM, dtype=torch.bfloat16)
    layer.decay.float()
    given = {x.untyped_storage().data_ptr() for x in (x_BSD, *layer.parameters())}
    mask, kept = layer.core.mask(torch.zeros(1, 512, dtype=torch.int64)), {}
    with saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        layer(x_BSD, None, mask)
    sizes = [x.untyped_storage().nbytes() for p, x in kept.items() if p not in given]
    assert sum(sizes) / 2 / 512 == pytest.approx(attention_stats(config, DIM).saved, rel=0.01)


def test_costs_of_mamba2_equal_its_parameters_and_products():
    counted = attention_stats(CONFIG, DIM)
    assert counted.parameters == sum(p.numel() for p in _layer().parameters())
    c, b = torch.randn(2, 1, 2, 7, CONFIG.key_dim)
    x, rates = torch.randn(1, 6, 7, CONFIG.value_dim), torch.zeros(1, 6, 7)
    with FlopCounterMode(display=False) as counter:
        recur_additively(c, b, x, torch.zeros(1, 7), rates, rates)
    assert counter.get_total_flops() == 7 * 2 * counted.state_products
