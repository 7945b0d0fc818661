"""grouped_mm as one operation that torch.compile does not look into.

torch 2.13 traces its grouped GEMM in bfloat16 alone, though it computes it in float32 and float16
too, and a loop over experts asks for their sizes, which a graph does not know. Importing this file
registers `torch.ops.titan_moe.grouped_mm`, for `grouped_mm` to call while a graph is traced. As
there, rows past the last offset belong to no expert.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from titan_moe.ops.grouped_mm import grouped_mm, grouped_mm_backward


@torch.library.custom_op("titan_moe::grouped_mm", mutates_args=())
def opaque_grouped_mm(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """As `grouped_mm`."""
    return grouped_mm(x_RD, w_EFD, offsets_E)


@opaque_grouped_mm.register_fake
def _(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    return x_RD.new_empty(x_RD.shape[0], w_EFD.shape[1])


@torch.library.custom_op("titan_moe::grouped_mm_backward", mutates_args=())
def _gradients(
    grad_RF: Tensor, x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor
) -> tuple[Tensor, Tensor]:
    return grouped_mm_backward(grad_RF, x_RD, w_EFD, offsets_E)


@_gradients.register_fake
def _(grad_RF: Tensor, x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_RD), torch.empty_like(w_EFD)


def _keep_arguments(
    ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor
) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_RF: Tensor):  # type: ignore[no-untyped-def]
    # torch's GEMM refuses an expanded gradient, such as that of a plain sum.
    grads = torch.ops.titan_moe.grouped_mm_backward(grad_RF.contiguous(), *ctx.saved_tensors)
    return *grads, None


opaque_grouped_mm.register_autograd(_backward, setup_context=_keep_arguments)
