"""The Triton kernels of cross_entropy: a program reads a token's logits twice and writes them once.

The second time they come from the L2 cache, where the rows of all running programs fit.
"""

import triton
import triton.language as tl
from torch import Tensor

from titan_moe.ops.operation import at_least_float32

# Logits that a program loads at once: 16 a thread, for bf16 two loads of 16 bytes.
_BLOCK, _WARPS = 4096, 8
_IGNORED = -100  # As torch has it, and cross_entropy.IGNORE_INDEX.


def cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `cross_entropy.cross_entropy`; the gradient overwrites the logits."""
    losses_T = _numbers_like(logits_TV)
    _launch(_cross_entropy_kernel, logits_TV, labels_T.contiguous(), losses_T)
    return losses_T.double().sum(), logits_TV


def block_statistics(
    logits_TV: Tensor, labels_T: Tensor, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `cross_entropy.block_statistics`."""
    largest_T, sum_T, target_T = (_numbers_like(logits_TV) for _ in range(3))
    labels_T = labels_T.contiguous()
    _launch(_statistics_kernel, logits_TV, labels_T, largest_T, sum_T, target_T, first)
    return largest_T, sum_T, target_T


def gradient_in_place(logits_TV: Tensor, labels_T: Tensor, first: int, lse_T: Tensor) -> Tensor:
    """Computes `cross_entropy.gradient_in_place`."""
    _launch(_gradient_kernel, logits_TV, labels_T.contiguous(), lse_T.contiguous(), first)
    return logits_TV


def _numbers_like(logits_TV: Tensor) -> Tensor:
    return logits_TV.new_empty(len(logits_TV), dtype=at_least_float32(logits_TV))


def _launch(kernel, logits_TV: Tensor, *arguments) -> None:  # type: ignore[no-untyped-def]
    assert logits_TV.is_contiguous()
    num_tokens, width = logits_TV.shape
    if num_tokens:
        kernel[(num_tokens,)](
            logits_TV,
            *arguments,
            WIDTH=width,
            IGNORED=_IGNORED,
            BLOCK=min(triton.next_power_of_2(width), _BLOCK),
            WIDE=logits_TV.element_size() == 8,
            num_warps=_WARPS,
        )


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,
    labels_ptr,
    losses_ptr,
    WIDTH: tl.constexpr,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    token = tl.program_id(0)
    row_ptr = logits_ptr + token.to(tl.int64) * WIDTH
    label = tl.load(labels_ptr + token)
    inside = (label >= 0) & (label < WIDTH)
    # Before the reductions, after which others of the program write.
    target = tl.load(row_ptr + label, mask=inside, other=0)
    largest, total = _largest_and_sum(row_ptr, WIDTH, BLOCK, WIDE)
    lse = tl.where(inside | (label == IGNORED), largest + tl.log(total), float("nan"))
    tl.store(losses_ptr + token, tl.where(label == IGNORED, 0.0, lse - target.to(lse.dtype)))
    _write_gradient(row_ptr, label, label == IGNORED, lse, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["first"])
def _statistics_kernel(
    logits_ptr,
    labels_ptr,
    largest_ptr,
    sum_ptr,
    target_ptr,
    first,
    WIDTH: tl.constexpr,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    token = tl.program_id(0)
    row_ptr = logits_ptr + token.to(tl.int64) * WIDTH
    column = tl.load(labels_ptr + token) - first
    target = tl.load(row_ptr + column, mask=(column >= 0) & (column < WIDTH), other=0)
    largest, total = _largest_and_sum(row_ptr, WIDTH, BLOCK, WIDE)
    tl.store(largest_ptr + token, largest)
    tl.store(sum_ptr + token, total)
    tl.store(target_ptr + token, target.to(largest.dtype))


@triton.jit(do_not_specialize=["first"])
def _gradient_kernel(
    logits_ptr,
    labels_ptr,
    lse_ptr,
    first,
    WIDTH: tl.constexpr,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    token = tl.program_id(0)
    row_ptr = logits_ptr + token.to(tl.int64) * WIDTH
    label = tl.load(labels_ptr + token)
    lse = tl.load(lse_ptr + token)
    _write_gradient(row_ptr, label - first, label == IGNORED, lse, WIDTH, BLOCK)


@triton.jit
def _largest_and_sum(row_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Returns the largest logit of a row and the sum of exp(logit - largest), by lanes first."""
    dtype = tl.float64 if WIDE else tl.float32
    columns = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -3.0e38, dtype)
    total = tl.zeros((BLOCK,), dtype)
    for start in range(0, WIDTH, BLOCK):
        inside = start + columns < WIDTH
        x = tl.load(row_ptr + start + columns, mask=inside, other=float("-inf")).to(dtype)
        # One of exp(largest - m) and exp(x - m) is 1, where m is the larger of both.
        smaller = tl.exp(-tl.abs(x - largest))
        total = tl.where(x > largest, total * smaller + 1, total + smaller)
        largest = tl.maximum(largest, x)
    whole = tl.max(largest, 0)
    return whole, tl.sum(total * tl.exp(largest - whole), 0)


@triton.jit
def _write_gradient(row_ptr, target, ignored, lse, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Writes probabilities, less 1 at the target's column; 0 for a token without a target."""
    columns = tl.arange(0, BLOCK)
    for start in range(0, WIDTH, BLOCK):
        column = start + columns
        inside = column < WIDTH
        x = tl.load(row_ptr + column, mask=inside, other=0).to(lse.dtype)
        grad = tl.exp(x - lse) - tl.where(column == target, 1.0, 0.0)
        grad = tl.where(ignored, 0.0, grad)
        tl.store(row_ptr + column, grad.to(row_ptr.dtype.element_ty), mask=inside)
