"""One matrix product per expert, over rows that lie expert after expert."""

import torch
import torch.nn.functional as F
from torch import Tensor

_GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_STRIDE_BYTES = 16


def grouped_mm(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """y_RF = x_RD @ w_EFD[e].T for the rows of each expert e; differentiable in x and w.

    The rows of expert e are those from offsets_E[e - 1] (0 for the first) up to offsets_E[e]. Rows
    past the last offset belong to nobody: nothing reads them in x or in the gradient of y, so they
    may hold NaN, and what the result and the gradient of x hold there is undefined: callers never
    read it.

    torch's grouped GEMM serves bfloat16, float16 and float32 where rows of D and of F elements are
    multiples of 16 bytes; anything else (float64, odd sizes) runs as a loop over the experts.

    Args:
        x_RD: rows, contiguous.
        w_EFD: one [F, D] matrix per expert, contiguous.
        offsets_E: int32, ascending: where each expert's rows end.
    """
    if torch.compiler.is_compiling() and not _is_traceable(w_EFD):
        return torch.ops.titan_moe.grouped_mm(x_RD, w_EFD, offsets_E)
    if has_grouped_gemm(w_EFD):
        y_RF = F.grouped_mm(x_RD, w_EFD.transpose(-2, -1), offs=offsets_E)
        if y_RF.requires_grad:
            # torch refuses an expanded gradient, such as that of a plain sum.
            y_RF.register_hook(torch.Tensor.contiguous)
        return y_RF
    return grouped_mm_loop(x_RD, w_EFD, offsets_E)


def has_grouped_gemm(w_EFD: Tensor) -> bool:
    """Whether torch's grouped GEMM takes these weights, forward and backward."""
    rows_are_aligned = all(
        size * w_EFD.element_size() % _STRIDE_BYTES == 0 for size in w_EFD.shape[-2:]
    )
    return w_EFD.dtype in _GROUPED_DTYPES and rows_are_aligned


def _is_traceable(w_EFD: Tensor) -> bool:
    # torch 2.13 refuses other types in a graph, and loops ask for sizes: grouped_mm_opaque.py.
    return w_EFD.dtype == torch.bfloat16 and has_grouped_gemm(w_EFD)


def grouped_mm_loop(x_RD: Tensor, w_EFD: Tensor, offsets_E: Tensor) -> Tensor:
    """As grouped_mm, one product per expert: for all that torch's grouped GEMM refuses."""
    ends = offsets_E.tolist()  # Host sync on a GPU.
    sizes = [end - start for start, end in zip([0, *ends], [*ends, len(x_RD)], strict=True)]
    # split and unbind: their backward fills one gradient, where slicing would fill one per expert.
    *groups, tail_RD = x_RD.split(sizes)
    parts = [x_rD @ w_FD.T for x_rD, w_FD in zip(groups, w_EFD.unbind(0), strict=True)]
    return torch.cat([*parts, x_RD.new_zeros(len(tail_RD), w_EFD.shape[1])])
