"""A bias per expert, added to rows that lie expert after expert."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


def add_bias(
    y_RF: Tensor, bias_EF: Tensor, offsets_E: Tensor, weights_R1: Tensor | None = None
) -> Tensor:
    """y_RF + each row's expert's bias, times the row's weight if there are weights.

    Neither the spread biases nor y are kept for the backward. The bias's gradient is the sum over
    each expert's rows; it multiplies with a matrix of zeros and weights, [E, R], instead of adding
    row by row: the same bits in every repeat, at F * E * R multiplications. As in `grouped_mm`,
    rows past the last offset belong to nobody.
    """
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
        return y_RF + (rows_RF if weights_R1 is None else rows_RF.mul_(weights_R1))

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
        grad_weights_R1 = spread_RF.mul_(masked_RF).sum(-1, keepdim=True)
        # A weight past the last offset is nobody's either, and may be anything.
        tail_R = (expert_R == len(offsets_E))[:, None]
        masked_RF.mul_(weights_R1.masked_fill(tail_R, 0))
        return grad_RF, rows_ER @ masked_RF, None, grad_weights_R1


def _spread(bias_EF: Tensor, offsets_E: Tensor, num_rows: int) -> Tensor:
    expert_R = _expert_of_rows(offsets_E, num_rows)
    return bias_EF.index_select(0, expert_R.clamp_(max=len(offsets_E) - 1))


def _expert_of_rows(offsets_E: Tensor, num_rows: int) -> Tensor:
    rows_R = torch.arange(num_rows, dtype=offsets_E.dtype, device=offsets_E.device)
    return torch.searchsorted(offsets_E, rows_R, right=True)
