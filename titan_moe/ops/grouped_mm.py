"""One matrix product, and one bias, per expert, over rows that lie expert after expert."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from titan_moe.ops.operation import operation

GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function with the signature of `grouped_mm`, differentiable in rows and weights."""

_GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_STRIDE_BYTES = 16


def grouped_mm(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """Computes y_RF = x_RD @ w_EFD[e].T for the rows of each expert e; differentiable in x and w.

    The rows of expert e are those from offsets_E[e - 1] (0 for the first) up to offsets_E[e]. Rows
    past the last offset belong to no expert: nothing reads them in x or in the gradient of y, so
    they may hold NaN, and what the result and the gradient of x hold there is undefined: callers
    never read it.

    torch's grouped GEMM serves bfloat16, float16 and float32 where rows of D and of F elements are
    multiples of 16 bytes; anything else (float64, odd sizes) runs as a loop over the experts.
    Compiled graphs do not look into it: torch 2.13 traces its GEMM in bfloat16 alone, and a loop
    asks for sizes that a graph does not know.

    Args:
        x_RD: rows, contiguous.
        w_EFD: one [F, D] matrix per expert, contiguous.
        offsets_E: int32, ascending: where each expert's rows end.
    """
    return _GroupedMM.apply(x_RD, w_EFD, offsets_E)


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_RD, w_EFD, offsets_E)
        return _grouped_mm(x_RD, w_EFD, offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RF: Tensor):  # type: ignore[override, no-untyped-def]
        x_RD, w_EFD, offsets_E = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        return *grouped_mm_backward(grad_RF, x_RD, w_EFD, offsets_E, needed), None


def _product(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    if has_grouped_gemm(w_EFD):
        return F.grouped_mm(x_RD, w_EFD.transpose(-2, -1), offs=offsets_E)
    return grouped_mm_loop(x_RD, w_EFD, offsets_E)


@operation("grouped_mm", _product)
def _grouped_mm(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    return x_RD.new_empty(x_RD.shape[0], w_EFD.shape[1])


def grouped_mm_grad_rows(grad_RF: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """The gradient of x, from a contiguous gradient of `grouped_mm`'s result."""
    return _grouped_mm(grad_RF, w_EFD.transpose(-2, -1), offsets_E)


def _product_grad_weights(
    grad_RF: Tensor, x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor
) -> Tensor:
    if has_grouped_gemm(w_EFD):
        return F.grouped_mm(grad_RF.t(), x_RD, offs=offsets_E)
    grad_EFD, start = torch.empty_like(w_EFD), 0
    for expert, end in enumerate(offsets_E.tolist()):  # Host sync on a GPU.
        torch.mm(grad_RF[start:end].t(), x_RD[start:end], out=grad_EFD[expert])
        start = end
    return grad_EFD


@operation("grouped_mm_grad_weights", _product_grad_weights)
def grouped_mm_grad_weights(
    grad_RF: Tensor, x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor
) -> Tensor:
    """The gradient of w, from a contiguous gradient; only the type and shape of w are read."""
    return torch.empty_like(w_EFD)


def grouped_mm_backward(
    grad_RF: Tensor,
    x_RD: Tensor,
    w_EFD: Tensor,
    offsets_E: Tensor,
    needed: tuple[bool, bool] = (True, True),
) -> tuple[Any, Any]:
    """Returns the gradients of x and of w, given that of y = grouped_mm(x_RD, w_EFD, offsets_E).
    One that is not `needed` is None, as for a frozen w, or for x before the first trained
    weight."""
    grad_RF = grad_RF.contiguous()  # torch refuses an expanded one, such as that of a plain sum.
    of_rows, of_weights = needed
    return (
        grouped_mm_grad_rows(grad_RF, w_EFD, offsets_E) if of_rows else None,
        grouped_mm_grad_weights(grad_RF, x_RD, w_EFD, offsets_E) if of_weights else None,
    )


def has_grouped_gemm(w_EFD: Tensor) -> bool:
    """Returns whether torch's grouped GEMM takes these weights, forward and backward."""
    rows_are_aligned = all(
        size * w_EFD.element_size() % _STRIDE_BYTES == 0 for size in w_EFD.shape[-2:]
    )
    return w_EFD.dtype in _GROUPED_DTYPES and rows_are_aligned


def grouped_mm_loop(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """Computes `grouped_mm` by one product per expert, for weights that torch's GEMM refuses."""
    ends = offsets_E.tolist()  # Host sync on a GPU.
    sizes = [end - start for start, end in zip([0, *ends], [*ends, len(x_RD)], strict=True)]
    # split and unbind: their backward fills one gradient, where slicing would fill one per expert.
    *groups, tail_RD = x_RD.split(sizes)
    parts = [x_rD @ w_FD.T for x_rD, w_FD in zip(groups, w_EFD.unbind(0), strict=True)]
    return torch.cat([*parts, x_RD.new_zeros(len(tail_RD), w_EFD.shape[1])])


def add_bias(
    y_RF: Tensor, bias_EF: Tensor | None, offsets_E: Tensor, weights_R1: Tensor | None = None
) -> Tensor:
    """Adds to each row of y_RF its expert's bias, times the row's weight if there are weights.
    Returns y_RF if there is no bias.

    Neither the spread biases nor y are kept for the backward. The bias's gradient is the sum over
    each expert's rows; it multiplies with a matrix of zeros and weights, [E, R], instead of adding
    row by row: the same bits in every repeat, at F * E * R multiplications. As in `grouped_mm`,
    rows past the last offset belong to no expert.
    """
    if bias_EF is None:
        return y_RF
    return _AddBias.apply(y_RF, bias_EF, offsets_E, weights_R1)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        y_RF: Tensor,
        bias_EF: Tensor,
        offsets_E: Tensor,
        weights_R1: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(bias_EF, offsets_E, weights_R1)  # type: ignore[arg-type]
        rows_RF = _spread(bias_EF, offsets_E, len(y_RF))
        return y_RF + (rows_RF if weights_R1 is None else rows_RF.mul_(weights_R1.to(y_RF.dtype)))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RF: Tensor):  # type: ignore[override, no-untyped-def]
        bias_EF, offsets_E, weights_R1 = ctx.saved_tensors
        expert_R = _expert_of_rows(offsets_E, len(grad_RF))
        masked_RF = grad_RF.masked_fill((expert_R == len(offsets_E))[:, None], 0)
        experts_E1 = torch.arange(len(offsets_E), device=grad_RF.device)[:, None]
        rows_ER = (experts_E1 == expert_R).to(grad_RF.dtype)
        if weights_R1 is None:
            return grad_RF, rows_ER @ masked_RF, None, None
        spread_RF = _spread(bias_EF, offsets_E, len(grad_RF))
        grad_weights_R1 = spread_RF.mul_(masked_RF).sum(-1, keepdim=True).to(weights_R1.dtype)
        # A weight past the last offset belongs to no expert either, and may be anything.
        tail_R = (expert_R == len(offsets_E))[:, None]
        masked_RF.mul_(weights_R1.masked_fill(tail_R, 0).to(grad_RF.dtype))
        return grad_RF, rows_ER @ masked_RF, None, grad_weights_R1


def _spread(bias_EF: Tensor, offsets_E: Tensor, num_rows: int) -> Tensor:
    expert_R = _expert_of_rows(offsets_E, num_rows)
    return bias_EF.index_select(0, expert_R.clamp_(max=len(offsets_E) - 1))


def _expert_of_rows(offsets_E: Tensor, num_rows: int) -> Tensor:
    rows_R = torch.arange(num_rows, dtype=offsets_E.dtype, device=offsets_E.device)
    return torch.searchsorted(offsets_E, rows_R, right=True)
