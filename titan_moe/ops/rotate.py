"""Rotation of pairs of channels by the angles of positions.

In plain torch it is a chain of elementwise passes; on CUDA one Triton kernel forward and one
backward. While a graph is traced the plain form stays, which the compiler fuses itself.
"""

import torch
from torch import Tensor

from titan_moe.ops.linear import linear
from titan_moe.ops.operation import operation

PAIRINGS = "halves", "neighbours"


def rotate(
    x_BSHC: Tensor, cos_BSC: Tensor, sin_BSC: Tensor, pairing: str, first: int = 0
) -> Tensor:
    """Rotates pairs of channels, from channel `first` on as many as there are angles for.

    Args:
        cos_BSC, sin_BSC: cosines and sines, in the type that computes; its result is rounded once.
        pairing: one of `PAIRINGS`. Of 2 C rotated channels, i and i + C are a pair, or 2 i and
            2 i + 1.
    """
    assert pairing in PAIRINGS, pairing
    if x_BSHC.is_cuda and not torch.compiler.is_compiling():
        return rotate_by_kernel(x_BSHC, cos_BSC, sin_BSC, pairing, first)
    return rotate_reference(x_BSHC, cos_BSC, sin_BSC, pairing, first)


def rotate_by_kernel(
    x_BSHC: Tensor, cos_BSC: Tensor, sin_BSC: Tensor, pairing: str, first: int = 0
) -> Tensor:
    """Computes `rotate`; the gradient is rotated back, so that the backward needs no activation."""
    return linear(
        x_BSHC,
        lambda x_BSHC: rotate_heads(x_BSHC, cos_BSC, sin_BSC, pairing, first, False),
        lambda grad_BSHC, cos, sin: rotate_heads(grad_BSHC, cos, sin, pairing, first, True),
        cos_BSC,
        sin_BSC,
    )


def rotate_reference(
    x_BSHC: Tensor,
    cos_BSC: Tensor,
    sin_BSC: Tensor,
    pairing: str,
    first: int = 0,
    backward: bool = False,
) -> Tensor:
    """Computes `rotate_heads` in plain torch."""
    width = 2 * cos_BSC.shape[-1]
    if width < x_BSHC.shape[-1]:
        before, x_BSHC, after = x_BSHC.tensor_split([first, first + width], dim=-1)
        rotated = rotate_reference(x_BSHC, cos_BSC, sin_BSC, pairing, 0, backward)
        return torch.cat([before, rotated, after], dim=-1)
    cos, sin = cos_BSC[:, :, None], sin_BSC[:, :, None]
    sin = -sin if backward else sin
    x = x_BSHC.to(cos.dtype)
    if pairing == "halves":
        a, b = x.chunk(2, dim=-1)
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    elif x.is_cpu and not torch.compiler.is_compiling():
        # The same products and sums in one pass; strided ones take five times as long on a CPU.
        x = x.contiguous()
        x = x.clone() if x.storage_offset() % 2 else x  # A complex number lies at an even place.
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        rotated = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
    else:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return rotated.to(x_BSHC.dtype)


@operation("rotate_heads", rotate_reference, triton="rotate_triton")
def rotate_heads(
    x_BSHC: Tensor, cos_BSC: Tensor, sin_BSC: Tensor, pairing: str, first: int, backward: bool
) -> Tensor:
    """Computes `rotate`; with `backward` its input's gradient from that of its result."""
    return x_BSHC.new_empty(x_BSHC.shape)
