"""Attention in blocks of queries, against torch's over all pairs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.visible import visible
from titan_moe.ops.blockwise_attention import attend_in_blocks

SCALE = 0.3


def _inputs(
    seq_len: int, *, kv_heads: int = 2, v_dim: int = 6, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """q, k, v as projections leave them: heads last but one in memory."""
    generator = torch.Generator().manual_seed(seq_len)
    shapes = [(2, seq_len, 4, 8), (2, seq_len, kv_heads, 8), (2, seq_len, kv_heads, v_dim)]
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype).transpose(1, 2).requires_grad_() for x in drawn]


def _documents(seq_len: int) -> Tensor:
    """[2, 1, S, S]: two rows, cut differently."""
    documents_BS = torch.stack([torch.arange(seq_len) // 7, torch.arange(seq_len) // 19])
    return visible(documents_BS)[:, None]


def _oracle(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=SCALE, enable_gqa=True
    )


def _gradients(o_BHSC: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(o_BHSC.shape, generator=generator, dtype=torch.float64)
    return list(torch.autograd.grad(o_BHSC, inputs, grad.to(o_BHSC.dtype)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("seq_len", [1, 15, 48, 67, 300])
def test_blockwise_equals_attention_over_all_pairs(
    seq_len: int, kv_heads: int, masked: bool
) -> None:
    inputs = _inputs(seq_len, kv_heads=kv_heads)
    mask = _documents(seq_len) if masked else None
    expected, got = _oracle(*inputs, mask), attend_in_blocks(*inputs, mask, SCALE)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)
    for gradient, its_oracle in zip(
        _gradients(got, inputs), _gradients(expected, inputs), strict=True
    ):
        torch.testing.assert_close(gradient, its_oracle, rtol=0, atol=1e-13)


def test_blockwise_bfloat16_is_as_precise_as_torchs_attention() -> None:
    wide = _inputs(256, v_dim=8)
    inputs = [x.detach().bfloat16().requires_grad_() for x in wide]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = _gradients(_oracle(*wide, None), wide)
    torchs = _gradients(_oracle(*inputs, None), inputs)
    ours = _gradients(attend_in_blocks(*inputs, None, SCALE), inputs)
    for truth, other, own in zip(exact, torchs, ours, strict=True):
        assert (own - truth).norm() <= 1.5 * (other - truth).norm()
