"""Sums over tokens in bfloat16 against float64: none is in a type narrower than float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.token_sums import (
    BOUND,
    CASES,
    TOKENS,
    Case,
    D,
    Draw,
    attention,
    errors,
    of_embedding,
    of_module,
)
from titan_moe.ops.embedding import embedding

NARROW: dict[str, Callable[[Draw], Case]] = {
    "embedding": lambda draw: of_embedding(draw, nn.Embedding),
    "norm": lambda draw: of_module(draw, nn.LayerNorm(D), draw(TOKENS, D)),
    "attention": lambda draw: (F.scaled_dot_product_attention, attention(draw, TOKENS, 64, 1)),
}
"""torch's own, which on a CPU add up in the type of the gradient."""


@pytest.mark.parametrize("name", CASES)
def test_sums_over_32768_tokens_in_bfloat16_are_within_one_percent(name: str):
    assert max(errors(CASES[name](Draw("cpu")))) < BOUND


@pytest.mark.parametrize("name", NARROW)
def test_check_of_token_sums_finds_a_sum_in_bfloat16(name: str):
    assert max(errors(NARROW[name](Draw("cpu")))) > BOUND


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [[[3, 1, 3], [0, 3, 3]], 4, []], ids=str)
def test_embedding_gradient_equals_a_slow_loop(tokens: Any, dtype: torch.dtype):
    tokens_BS = torch.tensor(tokens, dtype=torch.int64)
    weight_VD = torch.randn(5, 2, dtype=dtype, requires_grad=True)
    grad_BSD = torch.randn(*tokens_BS.shape, 2, dtype=dtype)
    embedding(tokens_BS, weight_VD).backward(grad_BSD)
    expected_VD = torch.zeros(5, 2, dtype=torch.float64)
    for token, grad_D in zip(tokens_BS.flatten().tolist(), grad_BSD.view(-1, 2), strict=True):
        expected_VD[token] += grad_D
    torch.testing.assert_close(weight_VD.grad, expected_VD.to(dtype), rtol=1e-15, atol=0)
