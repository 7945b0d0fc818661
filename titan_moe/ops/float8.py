"""Matrix products in float8 (e4m3), scaled anew at every call, by torchao's means.

A product of rows and columns is exact but for the rounding of its operands, each scaled by its
largest element so that it fills float8's range:

    rowwise             a scale for each row of the left operand and each column of the right one,
                        a power of two, in the forward and in both gradients
    rowwise_with_gw_hp  the same, but the weights' gradient is computed in the operands' own type
    tensorwise          one scale for each operand
    blockwise, mxfp8    scales for blocks (`blockscaled`); mxfp8 of experts alone

Emulated, operands are rounded the same way and multiplied in float32: what a machine without float8
units can say about a training. torchao does not emulate its grouped GEMM, so that is done here.

A row's scale depends on all its elements. A layout that cuts the dim that is summed over
therefore rounds otherwise: the input features of a row-wise cut weight, in the backward the output
features of a column-wise cut one, and for the weights' gradient the tokens.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from titan_moe.ops.blockscaled import (
    BLOCK,
    MX_BLOCK,
    rounded_blocks,
    rounded_mx,
    rounded_squares,
)
from titan_moe.ops.grouped_mm import GroupedMM, grouped_mm

ALIGNMENTS = {"tensorwise": 16, "rowwise": 16, "rowwise_with_gw_hp": 16}
ALIGNMENTS |= {"blockwise": BLOCK, "mxfp8": MX_BLOCK}
"""Recipe -> what rows of each expert, and sizes of all dims, are multiples of."""

LinearProduct = Callable[[Tensor, Tensor], Tensor]


class Rounding(NamedTuple):
    """What an operand is in float8, by the dim that is summed over."""

    activations: Callable[[Tensor, int], Tensor]
    weights: Callable[[Tensor, int], Tensor]


def alignment(recipe: str) -> int:
    """What sizes are multiples of for a recipe."""
    return ALIGNMENTS[recipe]


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
        recipe: "rowwise", "rowwise_with_gw_hp", "tensorwise" or "blockwise".
        emulate: round as float8 does, but multiply in float32.
    """
    if recipe == "blockwise":
        return _blockwise_linear(emulate=emulate)
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


def _blockwise_linear(*, emulate: bool) -> LinearProduct:
    if emulate:
        return lambda x, w_FD: _EmulatedLinear.apply(x, w_FD, ROUNDINGS["blockwise"])
    with _quiet():
        from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    return lambda x, w_FD: fp8_blockwise_mm.apply(x, w_FD, BLOCK, x.dtype, False)


def float8_grouped_mm(recipe: str = "rowwise", *, emulate: bool) -> GroupedMM:
    """As `grouped_mm`, each expert's product in float8, differentiable in both.

    Each expert's rows are a multiple of `alignment(recipe)`, as are both dims of the weights.

    Args:
        recipe: "rowwise", "blockwise" or "mxfp8".
        emulate: as in `float8_linear`; waits for the device in the backward.
    """
    if emulate:
        return lambda x_RD, w_EFD, offsets_E: _EmulatedGroupedMM.apply(
            x_RD, w_EFD, offsets_E, ROUNDINGS[recipe]
        )
    product = _scaled_grouped_mm(recipe)

    def multiply(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
        y_RF = product(
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


def _scaled_grouped_mm(recipe: str) -> Callable[..., Tensor]:
    """torchao's own, of one signature."""
    with _quiet():
        if recipe == "mxfp8":
            from torchao.prototype.moe_training.mxfp8_grouped_mm import (
                _to_mxfp8_then_scaled_grouped_mm,
            )

            return _to_mxfp8_then_scaled_grouped_mm
        if recipe == "blockwise":
            from torchao.prototype.moe_training.blockwise_fp8.grouped_mm import (
                _to_fp8_blockwise_then_scaled_grouped_mm,
            )

            return _to_fp8_blockwise_then_scaled_grouped_mm
        assert recipe == "rowwise", recipe
        from torchao.prototype.moe_training.fp8_grouped_mm import (
            _to_fp8_rowwise_then_scaled_grouped_mm,
        )

        return _to_fp8_rowwise_then_scaled_grouped_mm


def has_deep_gemm() -> bool:
    """Whether torchao finds the package that multiplies block-wise scaled experts; without it, it
    emulates them."""
    with _quiet():
        from torchao.prototype.blockwise_fp8_training.deepgemm_grouped_kernels import (
            is_deep_gemm_available,
        )

    return is_deep_gemm_available()


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


ROUNDINGS = {
    "rowwise": Rounding(rounded, rounded),
    "blockwise": Rounding(rounded_blocks, rounded_squares),
    "mxfp8": Rounding(rounded_mx, rounded_mx),
}


class _EmulatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, w_FD: Tensor, rounding: Rounding) -> Tensor:
        ctx.save_for_backward(x, w_FD)
        ctx.rounding = rounding  # type: ignore[attr-defined]
        y = rounding.activations(x, -1) @ rounding.weights(w_FD, -1).t()
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override, no-untyped-def]
        (x, w_FD), (activations, weights) = ctx.saved_tensors, ctx.rounding
        grad_x = activations(grad, -1) @ weights(w_FD, 0)
        rows_TF, rows_TD = (activations(each.flatten(0, -2), 0) for each in (grad, x))
        return grad_x.to(x.dtype), (rows_TF.t() @ rows_TD).to(w_FD.dtype), None


class _EmulatedGroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor, rounding: Rounding
    ) -> Tensor:
        ctx.save_for_backward(x_RD, w_EFD, offsets_E)
        ctx.rounding = rounding  # type: ignore[attr-defined]
        y_RF = grouped_mm(rounding.activations(x_RD, -1), rounding.weights(w_EFD, -1), offsets_E)
        return y_RF.to(x_RD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RF: Tensor):  # type: ignore[override, no-untyped-def]
        (x_RD, w_EFD, offsets_E), (activations, weights) = ctx.saved_tensors, ctx.rounding
        w_EDF = weights(w_EFD, 1).transpose(1, 2).contiguous()
        grad_RD = grouped_mm(activations(grad_RF.contiguous(), -1), w_EDF, offsets_E)
        grad_EFD = torch.zeros_like(w_EFD)
        start = 0
        for expert, end in enumerate(offsets_E.tolist()):
            if end > start:  # The largest of no rows is not defined.
                grad_rF, x_rD = (activations(each[start:end], 0) for each in (grad_RF, x_RD))
                grad_EFD[expert] = grad_rF.t() @ x_rD
            start = end
        return grad_RD.to(x_RD.dtype), grad_EFD, None, None


@contextmanager
def _quiet() -> Iterator[None]:
    """torchao warns, when imported, of compiled parts for other GPUs than the machine's."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
