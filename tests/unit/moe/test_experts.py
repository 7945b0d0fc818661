"""The experts' activations, recomputed in the backward, against plain autograd in float64."""

import pytest
import torch

from tests.support.gated_cases import plain
from titan_moe.moe.experts import activated_projection, projections
from titan_moe.ops.gated import ACTIVATIONS
from titan_moe.ops.grouped_mm import grouped_mm_loop

COUNTS, TAIL, D, HIDDEN = [3, 0, 5, 1], 2, 6, 4
OFFSETS = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
ROWS = sum(COUNTS)


def drawn(*shape: int, scale: float = 1.0):
    return (scale * torch.randn(*shape, dtype=torch.float64)).requires_grad_()


def compared(ours, theirs, inputs, *, of_rows: int) -> None:
    """Values and gradients; the first inputs have a row per row, whose tail is no expert's."""
    assert len(ours) == len(theirs)
    grads = [torch.randn_like(y) for y in ours]
    found = torch.autograd.grad(ours, inputs, grads, retain_graph=True)
    wanted = torch.autograd.grad(theirs, inputs, grads)
    # A split backward comes by twice: what is kept must not have changed.
    again = torch.autograd.grad(ours, inputs, grads)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a[:ROWS], b[:ROWS], rtol=1e-12, atol=1e-13)
    for number, (a, b, c) in enumerate(zip(found, wanted, again, strict=True)):
        rows = slice(0, ROWS if number < of_rows else None)
        torch.testing.assert_close(a[rows], b[rows], rtol=1e-11, atol=1e-12)
        assert torch.equal(a[rows], c[rows])


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activated_projection_is_the_plain_one(name: str, weighted: bool):
    torch.manual_seed(0)
    # Wide enough that both sides of every clamp occur.
    gate, up = drawn(ROWS + TAIL, HIDDEN, scale=8), drawn(ROWS + TAIL, HIDDEN, scale=8)
    weights = torch.rand(ROWS + TAIL, 1, dtype=torch.float64, requires_grad=True)
    w2 = drawn(len(COUNTS), D, HIDDEN)
    ours = activated_projection(gate, up, weights if weighted else None, w2, OFFSETS, name)
    hidden = plain(name, gate, up) * (weights if weighted else 1)
    theirs = grouped_mm_loop(hidden, w2, OFFSETS)
    inputs = [gate, up, *([weights] if weighted else []), w2]
    compared([ours], [theirs], inputs, of_rows=len(inputs) - 1)


def test_scaled_projections_are_the_plain_ones():
    torch.manual_seed(0)
    x, weights = drawn(ROWS + TAIL, D), drawn(ROWS + TAIL, 1)
    w1, w3 = drawn(len(COUNTS), HIDDEN, D), drawn(len(COUNTS), HIDDEN, D)
    ours = projections(x, weights, w1, w3, OFFSETS)
    theirs = [grouped_mm_loop(x * weights, w, OFFSETS) for w in (w1, w3)]
    compared(ours, theirs, [x, weights, w1, w3], of_rows=2)
