"""A linear product of bfloat16 operands, in float32, on bfloat16 units.

The product of two bfloat16 numbers is exact in float32, so that one pass with sums in float32 has a
float32 product's precision. Gradients come in float32. Each is cut into three bfloat16 numbers that
add up to it, all but its last bits, and takes three passes.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


def split_linear(x_TD: Tensor, w_ED: Tensor) -> Tensor:
    """x @ w.T in float32, as `split_linear_reference`, in another order of sums. Differentiable."""
    return _SplitLinear.apply(x_TD, w_ED)


def split_linear_reference(x_TD: Tensor, w_ED: Tensor) -> Tensor:
    """`split_linear` in float32 arithmetic."""
    return x_TD.float() @ w_ED.float().t()


def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """bfloat16 numbers that add up to a float32 one, to 2^-24 of it; the largest first."""
    high = x.bfloat16()
    middle = (x - high.float()).bfloat16()
    return high, middle, (x - high.float() - middle.float()).bfloat16()


def _wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """The product of bfloat16 matrices with sums, and a result, in float32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_TD: Tensor, w_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, w_ED)
        return _wide_mm(x_TD, w_ED.t())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TE: Tensor):  # type: ignore[override, no-untyped-def]
        x_TD, w_ED = ctx.saved_tensors
        high, middle, low = parts(grad_TE)
        # The smallest terms first: what they add up to is not lost.
        grad_TD = _wide_mm(low, w_ED).add_(_wide_mm(middle, w_ED)).add_(_wide_mm(high, w_ED))
        grad_ED = _wide_mm(low.t(), x_TD).add_(_wide_mm(middle.t(), x_TD))
        grad_ED.add_(_wide_mm(high.t(), x_TD))
        return grad_TD.to(x_TD.dtype), grad_ED.to(w_ED.dtype)
