"""The kernels at the sizes of published models, odd ones among them, against plain torch."""

import pytest
import torch
from torch import Tensor

from tests.support.gated_cases import ACTIVATIONS, plain
from titan_moe.ops import cross_entropy, gated, grouped_mm, move_rows, permute_indices
from titan_moe.ops.operation import KERNELS

DEVICE = "cuda"
BOUNDS = {torch.bfloat16: 5e-3, torch.float32: 1e-5}
"""Relative norms of differences: a result is rounded once to its type."""
TYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(*shape, device=DEVICE, generator=generator).to(dtype)


def assert_near(found: Tensor, exact: Tensor, bound: float) -> None:
    assert found.shape == exact.shape
    assert (found.double() - exact.double()).norm() <= bound * exact.double().norm()


@pytest.mark.parametrize("ranks, experts, alignment", [(1, 128, 1), (16, 9, 16), (8, 48, 128)])
def test_permute_indices_of_many_rows(ranks: int, experts: int, alignment: int) -> None:
    counts_PE = (drawn(ranks, experts).relu() * 200_000 / (ranks * experts)).long().cpu()
    num_rows = int(counts_PE.sum()) + 37
    # On the CPU it is plain torch, which the slow loops of the unit tests prove.
    found, expected = (
        permute_indices.permute_indices(counts_PE.to(device), num_rows, alignment)
        for device in (DEVICE, "cpu")
    )
    for name in ("source_R", "position_R", "offsets_E"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name))


@TYPES
@pytest.mark.parametrize(
    "tokens, top_k, dim", [(16384, 8, 2048), (4097, 6, 7168), (10007, 4, 2880)]
)
def test_many_rows_are_copied_and_added(dtype: torch.dtype, tokens: int, top_k: int, dim: int):
    order = drawn(tokens * top_k).argsort()
    padding = torch.full((1001,), -1, device=DEVICE)
    source_R, x_TD = torch.cat([order // top_k, padding]), drawn(tokens, dim, dtype=dtype)
    expected_RD = move_rows.copy_rows_reference(x_TD, source_R)
    assert torch.equal(move_rows.copy_rows(x_TD, source_R), expected_RD)
    rows_TK, y_RD = order.argsort().view(tokens, top_k), drawn(len(source_R), dim, dtype=dtype)
    exact_TD = move_rows.add_rows_reference(y_RD.double(), rows_TK)
    assert_near(move_rows.add_rows(y_RD, rows_TK), exact_TD, BOUNDS[dtype])


@TYPES
@pytest.mark.parametrize(
    "experts, dim, hidden", [(128, 2048, 768), (64, 2048, 1408), (32, 2880, 2880)]
)
def test_grouped_products_of_many_rows(dtype: torch.dtype, experts: int, dim: int, hidden: int):
    # Padding gives each expert some rows in a run.
    counts_E = (drawn(experts).relu() * 32_768 / experts).long().clamp_min(16)
    offsets_E = counts_E.cumsum(0).int()
    num_rows = int(offsets_E[-1])
    x, w = drawn(num_rows, dim, dtype=dtype), drawn(experts, hidden, dim, dtype=dtype)
    grad = drawn(num_rows, hidden, dtype=dtype)
    results = []
    products = {grouped_mm.grouped_mm: dtype, grouped_mm.grouped_mm_loop: torch.float32}
    for multiply, wide in products.items():
        inputs = [each.to(wide).requires_grad_() for each in (x, w)]
        y = multiply(*inputs, offsets_E)
        results.append([y, *torch.autograd.grad(y, inputs, grad.to(wide))])
    for found, exact in zip(*results, strict=True):
        assert_near(found, exact, BOUNDS[dtype])


@TYPES
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("rows, dim", [(65537, 768), (20_001, 2880)])
def test_gated_values_of_many_rows(dtype: torch.dtype, rows: int, dim: int, name: str):
    gate, up, grad = (drawn(rows + n, dim, dtype=dtype)[n:] for n in range(3))
    gate_up, weights_R1 = [gate, up][: 1 + ACTIVATIONS[name].gated], drawn(rows, 1)
    exact = [each.double().requires_grad_() for each in (*gate_up, weights_R1)]
    hidden = plain(name, *exact[:-1]) * exact[-1]
    operands = *[*gate_up, None][:2], weights_R1, ACTIVATIONS[name]
    assert_near(gated.gated_rows(*operands), hidden, BOUNDS[dtype])
    found = gated.gated_rows_backward(grad.clone(), *operands)
    wanted = torch.autograd.grad(hidden, exact, grad.double())
    for ours, theirs in zip([x for x in found[:3] if x is not None], wanted, strict=True):
        assert_near(ours, theirs, BOUNDS[dtype])


@TYPES
def test_cross_entropy_of_a_large_vocabulary(dtype: torch.dtype) -> None:
    logits_TV, labels_T = drawn(1023, 151_936, dtype=dtype), drawn(1023).abs().mul(10_000).long()
    labels_T[::5] = cross_entropy.IGNORE_INDEX
    exact, exact_TV = KERNELS["cross_entropy"]["cpu"](logits_TV.double(), labels_T)
    loss, grad_TV = cross_entropy.cross_entropy(logits_TV.clone(), labels_T)
    assert_near(loss, exact, 1e-5)
    assert_near(grad_TV, exact_TV, BOUNDS[dtype])
