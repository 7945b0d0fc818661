"""The loss in chunks against whole logits and autograd, in float64; no logits are ever whole."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.operations import Operations
from titan_moe.ops.cross_entropy import IGNORE_INDEX, capped, cross_entropy
from titan_moe.ops.linear_cross_entropy import linear_cross_entropy

TOKENS, D, VOCABULARY, FACTORS = 22, 3, 11, (1.0, 0.3)


def case(dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(TOKENS, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, D, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    labels[3:9] = IGNORE_INDEX
    return x, weight, labels


def whole(x, weight, labels, factors):
    losses = [
        factor * F.cross_entropy(xs @ weight.T, own, ignore_index=IGNORE_INDEX, reduction="sum")
        for xs, own, factor in zip(
            x.chunk(len(factors)), labels.chunk(len(factors)), factors, strict=True
        )
    ]
    return losses[0], sum(losses)


@pytest.mark.parametrize("factors", [(1.0,), FACTORS])
@pytest.mark.parametrize("chunk_size", [0, 1, 4, 11, 100])
def test_chunked_loss_and_gradients_equal_those_of_one_chunk(chunk_size: int, factors):
    x, weight, labels = case()
    ours = linear_cross_entropy(x, weight, labels, factors=factors, chunk_size=chunk_size)
    first, total = whole(x, weight, labels, factors)
    exact = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(ours.loss, first, **exact)
    torch.testing.assert_close(ours.loss + ours.further, total, **exact)
    assert not ours.further.requires_grad
    wanted = torch.autograd.grad(2.5 * total, (x, weight))
    for _ in range(2):  # A split backward comes by twice.
        found = torch.autograd.grad(2.5 * ours.loss, (x, weight), retain_graph=True)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, **exact)


def test_a_frozen_weight_has_no_gradient_and_costs_no_product():
    x, weight, labels = case()
    wanted = torch.autograd.grad(linear_cross_entropy(x, weight, labels).loss, x)[0]
    frozen = weight.detach()
    with Operations() as seen:
        linear_cross_entropy(x, frozen, labels).loss.backward()
    assert torch.equal(x.grad, wanted)
    assert frozen.shape not in seen.shapes


@pytest.mark.parametrize("chunk_size", [0, 4])
def test_output_weights_gradient_is_added_up_in_float32(chunk_size: int):
    x, weight, labels = case(torch.bfloat16)
    wide = [each.detach().double().requires_grad_() for each in (x, weight)]
    ours = linear_cross_entropy(x, weight, labels, chunk_size=chunk_size).loss
    assert ours.dtype == torch.float64
    found = torch.autograd.grad(ours, (x, weight))
    loss, _ = whole(*wide, labels, (1.0,))
    wanted = torch.autograd.grad(loss, wide)
    assert abs(ours.item() / loss.item() - 1) < 1e-2
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() < 1e-2 * b.norm()


def test_a_loss_in_float32_does_not_depend_on_the_number_of_chunks():
    torch.manual_seed(0)
    x, weight, labels = torch.randn(8192, 4), torch.randn(16, 4), torch.randint(0, 16, (8192,))
    exact = linear_cross_entropy(x.double(), weight.double(), labels).loss.item()
    for chunk_size in (0, 2):
        loss = linear_cross_entropy(x, weight, labels, chunk_size=chunk_size).loss.item()
        assert loss == pytest.approx(exact, rel=1e-8)


def test_no_more_logits_than_a_chunk_of_tokens_ever_exist():
    x, weight, labels = case()
    with Operations() as seen:
        linear_cross_entropy(x, weight, labels, chunk_size=4).loss.backward()
    logits = [shape for shape in seen.shapes if len(shape) == 2 and shape[1] == VOCABULARY]
    assert max(num_tokens for num_tokens, _ in logits) == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_capped_logits_near_the_cap_have_their_small_gradients(dtype: torch.dtype):
    """1 - tanh^2 would lose them: at three times the cap it is 0.01."""
    torch.manual_seed(0)
    cap = 5.0
    logits = (cap * torch.linspace(-3, 3, 24).repeat(8, 1)).to(dtype)
    labels = torch.randint(24, (8,))
    exact = logits.double().requires_grad_()
    wanted = F.cross_entropy(cap * (exact / cap).tanh(), labels, reduction="sum")
    wanted.backward()
    found, grad = capped(cross_entropy, cap)(logits.clone(), labels)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert found.item() == pytest.approx(wanted.item(), rel=bound)
    assert (grad.double() / exact.grad - 1).abs().max() <= bound
