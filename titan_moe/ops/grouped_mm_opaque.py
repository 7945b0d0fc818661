"""grouped_mm as one operation that torch.compile does not look into.

torch 2.13 traces its grouped GEMM in bfloat16 alone, though it computes it in float32 and float16
too, and a loop over experts asks for their sizes, which a graph does not know. Importing this file
registers `torch.ops.titan_moe.grouped_mm`, for `grouped_mm` to call while a graph is traced. As
there, rows past the last offset belong to no expert.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from titan_moe.ops.grouped_mm import (
    grouped_mm,
    grouped_mm_grad_rows,
    grouped_mm_grad_weights,
)


@torch.library.custom_op("titan_moe::grouped_mm", mutates_args=())
def opaque_grouped_mm(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """As `grouped_mm`."""
    return grouped_mm(x_RD, w_EFD, offsets_E)


@opaque_grouped_mm.register_fake
def _(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    return x_RD.new_empty(x_RD.shape[0], w_EFD.shape[1])


@torch.library.custom_op("titan_moe::grouped_mm_grad_rows", mutates_args=())
def _gradient_of_rows(grad_RF: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    return grouped_mm_grad_rows(grad_RF, w_EFD, offsets_E)


@_gradient_of_rows.register_fake
def _(grad_RF: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    return grad_RF.new_empty(grad_RF.shape[0], w_EFD.shape[2])


@torch.library.custom_op("titan_moe::grouped_mm_grad_weights", mutates_args=())
def _gradient_of_weights(grad_RF: Tensor, x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    return grouped_mm_grad_weights(grad_RF, x_RD, w_EFD, offsets_E)


@_gradient_of_weights.register_fake
def _(grad_RF: Tensor, x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    return torch.empty_like(w_EFD)


def _keep_arguments(
    ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor
) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_RF: Tensor):  # type: ignore[no-untyped-def]
    # torch's GEMM refuses an expanded gradient, such as that of a plain sum.
    x_RD, w_EFD, offsets_E = ctx.saved_tensors
    grad_RF = grad_RF.contiguous()
    return (
        torch.ops.titan_moe.grouped_mm_grad_rows(grad_RF, w_EFD, offsets_E),
        torch.ops.titan_moe.grouped_mm_grad_weights(grad_RF, x_RD, w_EFD, offsets_E),
        None,
    )


opaque_grouped_mm.register_autograd(_backward, setup_context=_keep_arguments)
