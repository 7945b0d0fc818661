"""Attention cores and layers against slow loops and against documents one by one."""

import pytest
import torch

from titan_moe.models.config import GQAConfig, MLAConfig, ModelConfig, RopeConfig
from titan_moe.models.decoder import Decoder, initial_std
from titan_moe.models.layers.attention_core import CausalSdpa, DocumentFlex, DocumentSdpa

DOCUMENTS_BS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 1]], dtype=torch.int32)


def slow_attention(q, k, v, documents_BS, scale):
    """Query by query, head by head."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    groups = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                seen = [j for j in range(i + 1) if documents_BS[b, j] == documents_BS[b, i]]
                scores = torch.stack([q[b, h, i] @ k[b, h // groups, j] * scale for j in seen])
                weights = scores.softmax(0)
                out[b, h, i] = sum(
                    w * v[b, h // groups, j] for w, j in zip(weights, seen, strict=True)
                )
    return out


def _qkv(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)]
    return [torch.randn(s, dtype=dtype, generator=generator).requires_grad_() for s in shapes]


@pytest.mark.parametrize("masked", [True, False])
def test_sdpa_cores_match_the_loop_with_grouped_heads(masked: bool):
    q, k, v = _qkv()
    core = DocumentSdpa() if masked else CausalSdpa()
    documents = DOCUMENTS_BS if masked else torch.zeros_like(DOCUMENTS_BS)
    out = core(q, k, v, core.mask(documents), 0.3)
    torch.testing.assert_close(out, slow_attention(q, k, v, documents, 0.3))


def test_flex_matches_the_explicit_mask():
    """Forward alone: torch has no backward of flex attention on the CPU; tests/gpu has both."""
    q, k, v = (x.detach() for x in _qkv(torch.float32))
    cores = (DocumentSdpa(), DocumentFlex(compiled=False))
    oracle, ours = (core(q, k, v, core.mask(DOCUMENTS_BS), 0.3) for core in cores)
    torch.testing.assert_close(ours, oracle, rtol=1e-5, atol=1e-5)


GQA = GQAConfig(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm="learned")
MLA = MLAConfig(num_heads=2, q_rank=12, kv_rank=8, nope_dim=8, rope_dim=4, v_dim=6)


@pytest.mark.parametrize("attention", [GQA, MLA])
def test_packed_documents_give_the_logits_of_each_alone(attention):
    config = ModelConfig(
        vocab_size=32, dim=16, num_layers=2, attention=attention,
        rope=RopeConfig(100.0), hidden_dim=32, moe=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Decoder(config, DocumentSdpa()).double()
    for name, parameter in model.named_parameters():
        if initial_std(name, config) is not None:
            parameter.data.normal_(0, 0.3)
    tokens_BS = torch.randint(0, 32, (2, 8))
    positions_BS = torch.arange(8).expand(2, 8)
    packed = model(tokens_BS, DOCUMENTS_BS, positions_BS)
    for b in range(2):
        for document in range(int(DOCUMENTS_BS[b].max()) + 1):
            where = DOCUMENTS_BS[b] == document
            tokens = tokens_BS[b, where][None]
            alone = model(tokens, torch.zeros_like(tokens), positions_BS[b, where][None])
            torch.testing.assert_close(packed[b, where], alone[0])


def test_initial_std_by_name():
    config = ModelConfig(
        vocab_size=8,
        dim=8,
        num_layers=8,
        attention=GQA,
        rope=RopeConfig(1.0),
        hidden_dim=8,
        moe=None,
    )
    assert initial_std("layers.0.attention_norm.weight", config) is None
    assert initial_std("layers.0.attention.q_norm.weight", config) is None
    assert initial_std("norm.weight", config) is None
    assert initial_std("layers.0.moe.experts.w2", config) == 0.02 / 4
    assert initial_std("layers.0.attention.wo.weight", config) == 0.02 / 4
    assert initial_std("output.weight", config) == 0.02
