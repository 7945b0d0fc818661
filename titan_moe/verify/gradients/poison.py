"""NaN in every row without a token, forward and backward: code that reads one is found."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from titan_moe.moe.dispatch.base import ExpertRows
from titan_moe.moe.layer import MoE


class Poison:
    """Counts the rows that it spoilt.

    Rows past the last expert's end are spoilt in the experts' input and output and in both
    gradients; the padding inside an expert's rows in the output alone: the weights' gradient is a
    product over those rows, which wants zeros in the input and in the output's gradient.
    """

    def __init__(self) -> None:
        self.tails = 0
        self.paddings = 0

    def apply(self, moe_layers: Iterable[MoE]) -> None:
        """Wrap the computation of every layer's experts."""
        for moe in moe_layers:
            moe.experts.compute = self._around(moe.experts.compute)

    def _around(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poisoned(rows: ExpertRows, *weights: Tensor) -> Tensor:
            row_R = torch.arange(len(rows.x_RD), device=rows.x_RD.device)
            tail_R1 = (row_R >= rows.offsets_E[-1])[:, None]
            padding_R1 = (rows.weights_R.detach() == 0)[:, None]
            self.tails += int(tail_R1.sum())
            self.paddings += int(padding_R1.sum()) - int(tail_R1.sum())
            x_RD = _spoilt(rows.x_RD, tail_R1)
            y_RD = compute(rows._replace(x_RD=x_RD), *weights)
            return _spoilt(y_RD, tail_R1).masked_fill(padding_R1, torch.nan)

        return poisoned


def _spoilt(x_RD: Tensor, where_R1: Tensor) -> Tensor:
    """NaN in some rows of a tensor, and of the gradient that goes back from them."""

    def spoil(grad_RD: Tensor) -> Tensor:
        return grad_RD.masked_fill(where_R1, torch.nan)

    if x_RD.requires_grad:
        x_RD.register_hook(spoil)  # type: ignore[no-untyped-call]
    return x_RD.masked_fill(where_R1, torch.nan)
