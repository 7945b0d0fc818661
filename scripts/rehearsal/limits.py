"""Limits of torch's kernels that a GPU alone shows: fake tensors pass them by.

Read in torch 2.11 to 2.14: flex attention's lowering for CUDA (its sums are float32 in any type),
the checks of flash attention, and those of grouped GEMMs. Kept apart from what titan_moe believes.
"""

import torch
from torch import Tensor

_NARROW = (torch.bfloat16, torch.float16)
_HEADS = {
    "flex_attention": (range(16, 1024), (*_NARROW, torch.float32)),
    "_varlen_attn": (range(8, 257, 8), _NARROW),
}
_LOADS_16_BYTES = ("_varlen_attn", "_grouped_mm")


def refuse(kernel: str, *tensors: Tensor) -> None:
    """Raises NotImplementedError for tensors that a kernel does not take.

    Args:
        kernel: a name; unknown ones take everything.
        tensors: of attention queries, keys and values; of a grouped GEMM both factors.
    """
    dims, types = _HEADS.get(kernel, (None, ()))
    for x in tensors:
        if dims is not None and (x.shape[-1] not in dims or x.dtype not in types):
            said = f"{kernel} takes no heads of {x.shape[-1]} channels in {x.dtype}"
            raise NotImplementedError(said)
        places = [x.storage_offset(), *(stride for stride in x.stride() if stride != 1)]
        if kernel in _LOADS_16_BYTES and any(n * x.element_size() % 16 for n in places):
            raise NotImplementedError(f"{kernel} loads 16 bytes, and a row begins between them")
