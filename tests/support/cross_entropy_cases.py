"""Cases for ops/cross_entropy.py, and torch's own loss in float64 to compare with."""

from collections.abc import Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.ops import cross_entropy as ops
from titan_moe.ops.cross_entropy import IGNORE_INDEX

DTYPES = [torch.bfloat16, torch.float32, torch.float64]
BOUNDS = {torch.bfloat16: 2**-8, torch.float32: 2e-6, torch.float64: 1e-14}
"""Tolerances of a gradient that is rounded to the logits' type, relative and absolute."""
# (tokens, V): narrower than a block, one token's worth, whole blocks, blocks and a rest, none.
SIZES = [(5, 11), (3, 1), (2, 8192), (3, 9001), (0, 11)]


def cases(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """logits_TV, labels_T, and of them the losses_T and their sum's gradient in float64."""
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 100.0):
        for num_tokens, width in SIZES:
            drawn = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
            logits_TV = (drawn * scale).to(dtype)
            labels_T = torch.randint(0, width, (num_tokens,), generator=generator)
            labels_T[1::3] = IGNORE_INDEX
            exact_TV = logits_TV.double().clone().requires_grad_()
            losses_T = F.cross_entropy(
                exact_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="none"
            )
            (grad_TV,) = torch.autograd.grad(losses_T.sum(), exact_TV)
            yield logits_TV, labels_T, losses_T.detach(), grad_TV


def check(dtype: torch.dtype, device: str = "cpu") -> None:
    """Checks the whole vocabulary at once, and in two blocks."""
    wide, exact = torch.promote_types(dtype, torch.float32), {torch.float64: 1e-13}
    bound = exact.get(wide, 1e-5)
    for logits_TV, labels_T, losses_T, wanted_TV in cases(dtype):
        labels = labels_T.to(device)
        loss, grad_TV = ops.cross_entropy(logits_TV.to(device, copy=True), labels)
        assert loss.dtype == torch.float64
        torch.testing.assert_close(loss.cpu().double(), losses_T.sum(), rtol=bound, atol=bound)
        _assert_gradient(grad_TV, wanted_TV, dtype)

        middle = logits_TV.shape[1] // 3
        halves = [(0, logits_TV[:, :middle]), (middle, logits_TV[:, middle:])]
        blocks = [(first, x.to(device).contiguous()) for first, x in halves if x.shape[1]]
        found = [ops.block_statistics(x, labels, first) for first, x in blocks]
        terms = [largest_T.double() + sum_T.double().log() for largest_T, sum_T, _ in found]
        lse_T = torch.stack(terms).logsumexp(0).to(wide)
        target_T = torch.stack([target_T for _, _, target_T in found]).sum(0)
        ours_T = (lse_T - target_T).masked_fill(labels == IGNORE_INDEX, 0)
        torch.testing.assert_close(ours_T.cpu().double(), losses_T, rtol=bound, atol=20 * bound)
        parts = [ops.gradient_in_place(x, labels, first, lse_T) for first, x in blocks]
        assert all(part is x for part, (_, x) in zip(parts, blocks, strict=True))
        _assert_gradient(torch.cat(parts, 1), wanted_TV, dtype)
    _check_what_is_not_finite(dtype, device)


def _check_what_is_not_finite(dtype: torch.dtype, device: str) -> None:
    """A logit that is NaN or infinite makes of loss and gradient what torch makes of them."""
    labels_1 = torch.zeros(1, dtype=torch.int64, device=device)
    for value, column, width in product((torch.nan, torch.inf, -torch.inf), (0, 3), (8, 9001)):
        logits_1V = torch.zeros(1, width, dtype=dtype, device=device)
        logits_1V[0, column] = value
        exact_1V = logits_1V.double().requires_grad_()
        wanted = F.cross_entropy(exact_1V, labels_1, reduction="sum")
        wanted = (wanted.detach(), *torch.autograd.grad(wanted, exact_1V))
        largest_1, sum_1, target_1 = ops.block_statistics(logits_1V, labels_1, 0)
        loss_1 = largest_1.double() + sum_1.double().log() - target_1.double()
        for found in ops.cross_entropy(logits_1V.clone(), labels_1), (loss_1[0], wanted[1]):
            found = [x.double() for x in found]
            torch.testing.assert_close(found, [*wanted], rtol=0.01, atol=1e-4, equal_nan=True)


def check_kernels(device: str) -> None:
    """Checks the kernels; a label outside of the vocabulary makes its row NaN, and no other one."""
    for dtype in DTYPES:
        check(dtype, device)
    for label in (11, -1, -101, 1 << 40):
        labels_2 = torch.tensor([label, 3], device=device)
        loss, grad_2V = ops.cross_entropy(torch.zeros(2, 11, device=device), labels_2)
        assert loss.isnan() and grad_2V.isnan().all(1).tolist() == [True, False]


def _assert_gradient(grad_TV: Tensor, wanted_TV: Tensor, dtype: torch.dtype) -> None:
    bound = BOUNDS[dtype]
    # A logit of hundreds in float32 leaves its last digits to the exponential.
    loose = 50 if dtype != torch.bfloat16 else 1
    torch.testing.assert_close(
        grad_TV.cpu().double(), wanted_TV, rtol=loose * bound, atol=loose * bound
    )
