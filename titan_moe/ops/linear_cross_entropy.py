"""The last projection and the sum of cross-entropies in one, in chunks of tokens.

Logits of all tokens never exist, nor do their gradients: each chunk's become the gradients of the
projection's input and weight on the spot. The loss is a plain sum, so the backward gets one
number and multiplies both by it. The idea is Liger-Kernel's (arXiv 2410.10989, section
3.2), which also spares the third product that recomputing logits in the backward would take.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from titan_moe.ops.cross_entropy import CrossEntropy, cross_entropy
from titan_moe.ops.operation import at_least_float32

# A product of narrow matrices that is added to a float32 one as it is computed: CUDA alone.
_ADDS_IN_FLOAT32 = "dtype_out" in torch.ops.aten.addmm.overloads()


class Losses(NamedTuple):
    """Sums of cross-entropies in float64: in float32 they would depend on the number of chunks."""

    loss: Tensor
    """Sum over the first part. Its backward is that of all parts, each times its factor."""
    further: Tensor
    """Sum over the other parts, each times its factor. Has no gradient of its own."""


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    factors: Sequence[float] = (1.0,),
    chunk_size: int = 0,
    cross_entropy: CrossEntropy = cross_entropy,
) -> Losses:
    """The cross-entropies of x @ weight.T; differentiable in x and weight, once.

    The weight's gradient stands from here to the backward, and adds its chunks up in at least
    float32; a frozen weight has none, and without gradients to come, neither is computed.

    Args:
        x_TD: as many equal parts as there are factors, one after the other.
        weight_VD: or this rank's rows of it, with a `cross_entropy` that knows.
        labels_T: IGNORE_INDEX where there is no target.
        factors: multiply each part's loss and gradients; the first is 1.
        chunk_size: most tokens whose logits exist at once; 0: a whole part.
    """
    assert factors[0] == 1.0 and len(x_TD) % len(factors) == 0
    with_gradients = torch.is_grad_enabled() and (x_TD.requires_grad or weight_VD.requires_grad)
    chunks = list(_chunks(len(x_TD), factors, chunk_size))
    needed = with_gradients, with_gradients and weight_VD.requires_grad
    options = chunks, len(x_TD) // len(factors), cross_entropy, needed
    return Losses(*_LinearCrossEntropy.apply(x_TD, weight_VD, labels_T, *options))


def _chunks(
    num_tokens: int, factors: Sequence[float], chunk_size: int
) -> Iterator[tuple[int, int, float]]:
    """Yields each chunk's first token, number of tokens and factor. Chunks of a part have nearly
    equal sizes, because some libraries prepare a product for each shape."""
    part = num_tokens // len(factors)
    chunks = -(-part // chunk_size) if chunk_size else 1
    size = max(-(-part // max(chunks, 1)), 1)
    for number, factor in enumerate(factors):
        for start in range(0, part, size):
            yield number * part + start, min(size, part - start), factor


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        chunks: list[tuple[int, int, float]],
        first_part: int,
        cross_entropy: CrossEntropy,
        needed: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        # Not views of one tensor: FSDP warns of a module that returns one.
        loss, further = (x_TD.new_zeros((), dtype=torch.float64) for _ in range(2))
        of_x, of_weight = needed
        grad_x_TD = torch.empty_like(x_TD) if of_x else None
        grad_weight_VD: Tensor | None = None
        for first, size, factor in chunks:
            x_tD = x_TD[first : first + size]
            logits_tV = x_tD @ weight_VD.T
            chunk_loss, grad_tV = cross_entropy(logits_tV, labels_T[first : first + size])
            total = loss if first < first_part else further
            total += factor * chunk_loss
            if grad_x_TD is None:
                continue
            if factor != 1.0:
                grad_tV *= factor
            grad_tV = grad_tV.to(weight_VD.dtype)
            torch.mm(grad_tV, weight_VD, out=grad_x_TD[first : first + size])
            if of_weight:
                grad_weight_VD = _added(grad_weight_VD, grad_tV, x_tD)
            del logits_tV, grad_tV  # The next chunk's would stand beside them.
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        ctx.save_for_backward(grad_x_TD, grad_weight_VD)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(further)
        return loss, further

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[override, no-untyped-def]
        # Not in place: a split backward comes by twice.
        grad_x_TD, grad_weight_VD = ctx.saved_tensors
        grads = (x if x is None else x * grad.to(x.dtype) for x in (grad_x_TD, grad_weight_VD))
        return *grads, None, None, None, None, None


def _added(sum_VD: Tensor | None, grad_tV: Tensor, x_tD: Tensor) -> Tensor:
    """Adds grad.T @ x to the sum so far, in at least float32 as soon as there are two terms."""
    if sum_VD is None:
        return grad_tV.T @ x_tD
    wide = at_least_float32(x_tD)
    if wide == x_tD.dtype:
        return sum_VD.addmm_(grad_tV.T, x_tD)
    if x_tD.is_cuda and _ADDS_IN_FLOAT32:
        sum_VD = sum_VD.to(wide)  # The first term was rounded.
        return torch.addmm(sum_VD, grad_tV.T, x_tD, out_dtype=wide, out=sum_VD)
    return sum_VD.to(wide).add_(grad_tV.T @ x_tD)
