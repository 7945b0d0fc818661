"""Matrix products in float8 (e4m3), scaled anew at every call, by torchao's means.

A product of rows and columns is exact but for the rounding of its operands, each scaled by its
largest element so that it fills float8's range:

    rowwise             a scale for each row of the left operand and each column of the right one,
                        a power of two, in the forward and in both gradients
    rowwise_with_gw_hp  the same, but the weights' gradient is computed in the operands' own type
    tensorwise          one scale for each operand

Emulated, operands are rounded the same way and multiplied in float32: what a machine without float8
units can say about a training. torchao does not emulate its grouped GEMM, so that is done here.

The scale of a row depends on its other elements. A layout that cuts the dim that is summed over
therefore rounds otherwise: the input features of a row-wise cut weight, in the backward the output
features of a column-wise cut one, and for the weights' gradient the tokens.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from titan_moe.ops.grouped_mm import GroupedMM, grouped_mm

ROW_ALIGNMENT = 16
"""Rows of each expert, and sizes of all dims, are multiples of this for float8 units."""

LinearProduct = Callable[[Tensor, Tensor], Tensor]


class Float8Linear(nn.Module):
    """A Linear, with its parameters, that multiplies in float8 and adds a bias outside of it.

    Args:
        linear: has `weight` and `bias`, which stay what they are in type, name and shape.
        multiply: of `float8_linear`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, multiply: LinearProduct) -> None:
        super().__init__()
        self.multiply = multiply
        self.weight = linear.weight  # type: ignore[assignment]
        self.register_parameter("bias", linear.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)

    def product(self, x: Tensor, w_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
        """As F.linear, of any part of the weight."""
        y = self.multiply(x, w_FD)
        return y if bias_F is None else y + bias_F


def float8_linear(recipe: str, *, emulate: bool) -> LinearProduct:
    """(x [..., D], w_FD) -> x @ w_FD.T in float8, differentiable in both.

    Args:
        recipe: "rowwise", "rowwise_with_gw_hp" or "tensorwise".
        emulate: round as float8 does, but multiply in float32.
    """
    with _quiet():
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args

    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", emulate)  # Frozen; recipes leave it out.
    with torch.device("meta"):
        products = Float8Linear(1, 1, bias=False, config=config).linear_mm_config

    def multiply(x: Tensor, w_FD: Tensor) -> Tensor:
        return matmul_with_hp_or_float8_args.apply(x, w_FD.t(), products, config)

    return multiply


def float8_grouped_mm(*, emulate: bool) -> GroupedMM:
    """As `grouped_mm`, each expert's product scaled row-wise, differentiable in both.

    Each expert's rows are a multiple of `ROW_ALIGNMENT`, as are both dims of the weights.

    Args:
        emulate: as in `float8_linear`; waits for the device in the backward.
    """
    if emulate:
        return _EmulatedGroupedMM.apply  # type: ignore[no-untyped-call]
    with _quiet():
        from torchao.prototype.moe_training.fp8_grouped_mm import (
            _to_fp8_rowwise_then_scaled_grouped_mm,
        )

    def multiply(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
        y_RF = _to_fp8_rowwise_then_scaled_grouped_mm(
            x_RD,
            w_EFD.transpose(-2, -1),
            offsets_E,
            out_dtype=x_RD.dtype,
            pad_token_groups_for_grouped_mm=False,
        )
        if y_RF.requires_grad:
            y_RF.register_hook(torch.Tensor.contiguous)
        return y_RF

    return multiply


def rounded(x: Tensor, dim: int) -> Tensor:
    """x as float8 holds it, with a scale of its own for everything along `dim`; in x's type."""
    with _quiet():
        from torchao.float8.config import ScalingGranularity
        from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    scale = tensor_to_scale(
        x,
        torch.float8_e4m3fn,
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=dim,
        round_scales_to_power_of_2=True,
    )
    return (to_fp8_saturated(x.float() * scale, torch.float8_e4m3fn).float() / scale).to(x.dtype)


class _EmulatedGroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_RD, w_EFD, offsets_E)
        return grouped_mm(rounded(x_RD, -1), rounded(w_EFD, -1), offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RF: Tensor):  # type: ignore[override, no-untyped-def]
        x_RD, w_EFD, offsets_E = ctx.saved_tensors
        w_EDF = rounded(w_EFD, 1).transpose(1, 2).contiguous()
        grad_RD = grouped_mm(rounded(grad_RF.contiguous(), -1), w_EDF, offsets_E)
        grad_EFD = torch.zeros_like(w_EFD)
        start = 0
        for expert, end in enumerate(offsets_E.tolist()):
            if end > start:  # The largest of no rows is not defined.
                grad_rF, x_rD = (rounded(each[start:end], 0) for each in (grad_RF, x_RD))
                grad_EFD[expert] = grad_rF.t() @ x_rD
            start = end
        return grad_RD, grad_EFD, None


@contextmanager
def _quiet() -> Iterator[None]:
    """torchao warns, when imported, of compiled parts for other GPUs than the machine's."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
