"""Matrix products in float8 (e4m3) by torchao, scaled anew at every call.

A product of rows and columns is exact but for the rounding of its operands, each scaled by its
largest element so that it fills float8's range:

    rowwise             a scale for each row of the left operand and each column of the right one,
                        a power of two, in the forward and in both gradients
    rowwise_with_gw_hp  the same, but the weights' gradient is computed in the operands' own type
    tensorwise          one scale for each operand
    mxfp8               a scale, a power of two, for 32 elements along the dim that is summed over;
                        of experts alone

torchao emulates Linear layers and mxfp8: operands are rounded the same way and multiplied wide. It
does not emulate row-wise experts.

A row's scale depends on all its elements. A layout that cuts the dim that is summed over
therefore rounds otherwise: the input features of a row-wise cut weight, in the backward the output
features of a column-wise cut one, and for the weights' gradient the tokens.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from titan_moe.ops.grouped_mm import GroupedMM

ALIGNMENTS = {"tensorwise": 16, "rowwise": 16, "rowwise_with_gw_hp": 16, "mxfp8": 32}
"""Recipe -> divisor of each expert's row count and of the sizes of all dims."""

LinearProduct = Callable[[Tensor, Tensor], Tensor]


class Float8Linear(nn.Module):
    """Multiplies with a Linear's parameters in float8; adds its bias afterwards, not in float8.

    Args:
        linear: has `weight` and `bias`, which stay what they are in type, name and shape.
        multiply: a result of `float8_linear`.
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

    def extra_repr(self) -> str:
        return self.multiply.__name__

    def product(self, x: Tensor, w_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
        """Computes F.linear in float8, with any part of the weight."""
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

    multiply.__name__ = recipe  # A printed model shows it.
    return multiply


def float8_grouped_mm(recipe: str = "rowwise", *, emulate: bool = False) -> GroupedMM:
    """Returns a `grouped_mm` of bfloat16 rows in float8, differentiable in rows and weights.

    Each expert's rows are a multiple of `ALIGNMENTS[recipe]`, as are both dims of the weights.

    Args:
        recipe: "rowwise" or "mxfp8".
        emulate: as in `float8_linear`; of mxfp8 alone.
    """
    product: Callable[..., Tensor]
    with _quiet():
        if recipe == "mxfp8":
            from torchao.prototype.moe_training.mxfp8_grouped_mm import (
                _to_mxfp8_then_scaled_grouped_mm,
            )
            from torchao.quantization.quantize_.common import KernelPreference

            preference = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
            product = partial(_to_mxfp8_then_scaled_grouped_mm, kernel_preference=preference)
        else:
            assert recipe == "rowwise" and not emulate, recipe
            from torchao.prototype.moe_training.fp8_grouped_mm import (
                _to_fp8_rowwise_then_scaled_grouped_mm,
            )

            product = _to_fp8_rowwise_then_scaled_grouped_mm

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

    multiply.__name__ = recipe
    return multiply


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences torchao's warnings at its import about compiled parts for other GPUs."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
