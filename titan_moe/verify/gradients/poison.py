"""NaN in every row without a token, forward and backward: code that reads one is found."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.moe.layer import MoE


class Poison:
    """Spoils the rows of every layer's experts, and counts them.

    Rows past the last expert's end are spoilt in the experts' input and output, in both gradients
    and in the routing weights; the padding inside an expert's rows in the output alone: the
    gradient of the experts' weights is a product over those rows, which wants zeros in the input
    and in the output's gradient.
    """

    def __init__(self, moe_layers: Iterable[MoE], device: str) -> None:
        self.tails = torch.zeros((), dtype=torch.int64, device=device)
        self.paddings = torch.zeros_like(self.tails)
        for moe in moe_layers:
            moe.experts.compute.register_forward_pre_hook(self._spoil_inputs)
            moe.experts.compute.register_forward_hook(self._spoil_outputs)

    def _spoil_inputs(self, module: object, args: tuple[ExpertRows, Any]) -> tuple[Any, ...]:
        rows, *weights = args
        tail_R1 = _tail(rows)
        weights_R = rows.weights_R.masked_fill(tail_R1[:, 0], torch.nan)
        # A compiled `_replace` of torch 2.11 returns an empty tuple.
        return ExpertRows(_Spoilt.apply(rows.x_RD, tail_R1), weights_R, rows.offsets_E), *weights

    def _spoil_outputs(self, module: object, args: tuple[ExpertRows, Any], y_RD: Tensor) -> Tensor:
        rows, tail_R1 = args[0], _tail(args[0])
        padding_R1 = (rows.weights_R.detach() == 0)[:, None]
        self.tails += tail_R1.sum()  # Not read here: that would end a compiled graph.
        self.paddings += padding_R1.sum()
        return _Spoilt.apply(y_RD, tail_R1).masked_fill(padding_R1, torch.nan)


def _tail(rows: ExpertRows) -> Tensor:
    """Returns whether a row is past the last expert's end, [R, 1]."""
    row_R = torch.arange(len(rows.x_RD), device=rows.x_RD.device)
    return (row_R >= rows.offsets_E[-1])[:, None]


class _Spoilt(torch.autograd.Function):
    """NaN in some rows of a tensor, and of the gradient that goes back from them.

    A hook of the tensor would do the same, but mixes up the order of a graph of torch 2.11.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x_RD: Tensor, where_R1: Tensor) -> Tensor:
        ctx.save_for_backward(where_R1)
        return x_RD.masked_fill(where_R1, torch.nan)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD: Tensor):  # type: ignore[override, no-untyped-def]
        (where_R1,) = ctx.saved_tensors
        return grad_RD.masked_fill(where_R1, torch.nan), None
