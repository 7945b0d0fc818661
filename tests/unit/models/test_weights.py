"""The parts' costs against torch's own count of FLOPs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.visible import visible
from titan_moe.models.decoder import Decoder
from titan_moe.models.registry import model_config
from titan_moe.models.stats import part_flops
from titan_moe.ops.attention import Sdpa
from titan_moe.ops.local_attention import LocalAttention, mean_seen

_SEQ_LEN = 64


@pytest.mark.parametrize("family", ["deepseek_v3", "direct", "glm4_moe", "minimax_m2", "qwen3"])
def test_weights_of_parts_are_flops_of_a_token(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All pairs, of which the half is easily told; blocks would leave some out.
    monkeypatch.setattr("titan_moe.ops.attention.MAX_SEQ_LEN", 0)
    name = "deepseek_v3" if family == "direct" else family
    config = replace(model_config(name, "gate"), num_layers=3)
    if family == "direct":  # Queries are projected at once, not through a latent.
        config = replace(config, attention=replace(config.attention, q_rank=None))
    model = Decoder(config, Sdpa()).double()  # torch counts neither grouped GEMMs
    weights = part_flops(config, _SEQ_LEN)
    assert list(weights) == ["tok_embeddings", "layers.0", "layers.1", "layers.2", "norm", "output"]

    tokens_BS = torch.zeros(1, _SEQ_LEN, dtype=torch.int64)
    positions_BS = torch.arange(_SEQ_LEN)[None]

    def grouped(x: tuple[int, ...], w: tuple[int, ...], *_: Any, **__: Any) -> int:
        return 2 * x[0] * w[1] * w[2]

    formulas = {torch.ops.titan_moe.grouped_mm: grouped}
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # nor the CPU's fused attention.
        model.eval()(tokens_BS, tokens_BS, positions_BS)
    counts = counter.get_flop_counts()
    heads = config.attention
    # torch counts attention's upper triangle too.
    unseen = 2 * heads.num_heads * (heads.qk_dim + heads.v_dim) * (_SEQ_LEN - 1) / 2
    for name, weight in weights.items():
        counted = sum(counts.get(f"Decoder.{name}", {}).values()) / _SEQ_LEN
        expected = weight + (unseen if name.startswith("layers.") else 0)
        if name == "output":  # Multi-token prediction does not run in an evaluation.
            expected = 2 * config.dim * config.vocab_size
        assert counted == pytest.approx(expected, rel=1e-12), name


def test_multi_token_prediction_costs_a_projection_a_layer_and_its_logits():
    config = model_config("deepseek_v3", "gate")
    ahead, plain = (part_flops(replace(config, num_mtp_layers=k), _SEQ_LEN) for k in (2, 0))
    layer, logits = plain["layers.1"], plain["output"]
    assert ahead == plain | {"output": logits + 2 * (4 * config.dim**2 + layer + logits)}


@pytest.mark.parametrize("seq_len", [1, 5, 6, 7, 12, 13, 48])
@pytest.mark.parametrize("kind", ["window", "chunk"])
@pytest.mark.parametrize("size", [1, 6, 100])
def test_mean_seen_equals_the_average_over_a_slow_loop(seq_len: int, kind: str, size: int):
    local = LocalAttention(kind, size)
    seen = visible(torch.zeros(1, seq_len), local).sum().item() / seq_len
    assert mean_seen(local, seq_len) == pytest.approx(seen, rel=1e-12)
    assert mean_seen(None, seq_len) == (seq_len + 1) / 2
