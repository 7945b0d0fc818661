"""The gradients of a grouped product, for those who keep something else than its input."""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.ops.grouped_mm import has_grouped_gemm


def grouped_mm_backward(
    grad_RF: Tensor, x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor
) -> tuple[Tensor, Tensor]:
    """Of y_RF = grouped_mm(x_RD, w_EFD, offsets_E): the gradients of x and of w, from that of y.

    As there, rows past the last offset belong to nobody: they are not read, and what the gradient
    of x holds there is undefined.
    """
    grad_RF = grad_RF.contiguous()  # torch refuses an expanded one, such as that of a plain sum.
    if torch.compiler.is_compiling():
        return torch.ops.titan_moe.grouped_mm_backward(grad_RF, x_RD, w_EFD, offsets_E)
    if has_grouped_gemm(w_EFD):
        return (
            F.grouped_mm(grad_RF, w_EFD, offs=offsets_E),
            F.grouped_mm(grad_RF.t(), x_RD, offs=offsets_E),
        )
    grad_RD, grad_EFD = torch.empty_like(x_RD), torch.empty_like(w_EFD)
    start = 0
    for expert, end in enumerate(offsets_E.tolist()):  # Host sync on a GPU.
        torch.mm(grad_RF[start:end], w_EFD[expert], out=grad_RD[start:end])
        torch.mm(grad_RF[start:end].t(), x_RD[start:end], out=grad_EFD[expert])
        start = end
    return grad_RD, grad_EFD
