"""Recurrent layers in a whole model: packed documents, initial values, costs."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.packing import filled, gradients, train_packed_and_alone
from titan_moe.models.config import ModelConfig
from titan_moe.models.decoder import Decoder
from titan_moe.models.gated_delta_net import Decay
from titan_moe.models.registry import model_config
from titan_moe.models.stats import attention_stats
from titan_moe.ops.attention import Sdpa
from titan_moe.ops.gated_delta import Recurrence, chunked_rule
from titan_moe.verify.gradients.cores import recur

CONFIG = replace(model_config("qwen3_next", "gate"), num_layers=4)
KIMI = replace(model_config("kimi_linear", "gate"), num_layers=4)
BOTH = pytest.mark.parametrize("config", [CONFIG, KIMI], ids=["qwen3_next", "kimi_linear"])


def _model(config: ModelConfig = CONFIG, *, mask_documents: bool = True) -> Decoder:
    core = Sdpa(mask_documents=mask_documents)
    recurrence = Recurrence(chunked_rule, mask_documents=mask_documents)
    return filled(config, core, recurrence).eval()


@BOTH
def test_packed_documents_are_trained_as_one_by_one(config: ModelConfig):
    packed = _model(config)
    train_packed_and_alone(packed, _model(config, mask_documents=False), (1, 2, 17, 70, 6))
    assert "layers.0.attention.conv.q.weight" in gradients(packed)


def test_recurrent_model_starts_with_published_values():
    weights = dict(_model().named_parameters())
    rate = weights["layers.0.attention.decay.A_log.weight"].exp()
    assert ((rate > 0.01) & (rate < 16)).all() and rate.max() > 4 * rate.min()
    assert (weights["layers.0.attention.decay.dt_bias.weight"] == 1).all()
    assert (weights["layers.0.attention.out_norm.weight"] == 1).all()
    for name in ("norm", "layers.0.attention_norm", "layers.1.attention.q_norm"):
        assert (weights[f"{name}.weight"] == 0).all()


@BOTH
def test_flops_of_the_recurrence_equal_its_matrix_products(config: ModelConfig):
    recurrent = config.recurrent
    assert recurrent is not None
    heads, keys, values = recurrent.num_value_heads, recurrent.key_dim, recurrent.value_dim
    q, k = torch.randn(2, 1, recurrent.num_key_heads, 5, keys)
    beta = torch.zeros(1, heads, 5)
    decay = beta if recurrent.gate_rank is None else beta[..., None].expand(-1, -1, -1, keys)
    with FlopCounterMode(display=False) as counter:
        recur(q, k, torch.randn(1, heads, 5, values), torch.zeros(1, 5), decay, beta)
    counted = attention_stats(recurrent, config.dim).state_products
    assert counter.get_total_flops() == 5 * 2 * counted


@pytest.mark.parametrize("key_dim", [None, 3])
def test_compiled_decay_takes_a_transposed_gradient(key_dim: int | None):
    """Its strides are not those of the decay's arguments, as in all graphs of torch 2.11."""
    linear = torch.nn.Linear(4, 2 * (key_dim or 1)).double()
    decay = Decay(2, linear.out_features).double()
    weights = [*linear.parameters(), *decay.parameters()]
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    for weight in weights:
        torch.nn.init.normal_(weight)

    def transposed(x: torch.Tensor) -> torch.Tensor:
        return decay(linear(x), x.dtype, key_dim).transpose(1, 2).contiguous()

    eager, compiled = (
        torch.autograd.grad(f(x).square().sum(), weights)
        for f in (transposed, torch.compile(transposed, backend="aot_eager"))
    )
    torch.testing.assert_close(compiled, eager)
