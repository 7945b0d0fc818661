"""How operands are rounded where blocks of them have scales of their own.

    mxfp8       32 elements along the dim that is summed over share a scale, a power of two (OCP
                Microscaling Formats 1.0); the scale is rounded up, so that nothing saturates
    blockwise   128 elements of an activation along that dim, or 128 x 128 of a weight, share a
                float32 scale (DeepSeek-V3, arXiv 2412.19437, section 3.3)

A block's scale depends on no element outside of it. A layout that cuts a dim at a multiple of the
block therefore rounds the same way, where a scale for each row would not.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

MX_BLOCK, BLOCK = 32, 128
_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max
# Of a block without a larger element, as torchao has it: scales stay finite.
_SMALLEST = 1e-12


def rounded_mx(x: Tensor, dim: int) -> Tensor:
    """x as mxfp8 holds it, in x's type; blocks lie along `dim`."""
    blocks = _blocks(x, dim, MX_BLOCK)
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True) / _LARGEST)
    # 2 to this is the smallest power of two that the largest element fits under.
    exponent = (exponent - (mantissa == 0.5).int()).clamp(-127, 127)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent)
    return _joined(_through_float8(blocks / scale) * scale, x, dim).to(x.dtype)


def rounded_blocks(x: Tensor, dim: int) -> Tensor:
    """An activation as block-wise float8 holds it, in at least float32; blocks lie along `dim`."""
    blocks = _blocks(x, dim, BLOCK)
    return _joined(_scaled(blocks, blocks.abs().amax(-1, keepdim=True)), x, dim)


def rounded_squares(w: Tensor, dim: int) -> Tensor:
    """A weight [..., M, N] as block-wise float8 holds it, in at least float32. It is the same for
    products that sum over either dim; both are multiples of 128."""
    blocks = _wide(w).unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    largest = blocks.abs().amax((-3, -1), keepdim=True)
    return _scaled(blocks, largest).flatten(-4, -3).flatten(-2, -1)


def _scaled(blocks: Tensor, largest: Tensor) -> Tensor:
    scale = (_LARGEST / largest.double().clamp(min=_SMALLEST)).float().to(blocks.dtype)
    return _through_float8(blocks * scale) / scale


def _through_float8(x: Tensor) -> Tensor:
    return x.float().clamp(-_LARGEST, _LARGEST).to(_FLOAT8).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _blocks(x: Tensor, dim: int, size: int) -> Tensor:
    """[..., N, size] with `dim` last, filled up with zeros, in at least float32."""
    moved = _wide(x).movedim(dim, -1)
    return F.pad(moved, (0, -moved.shape[-1] % size)).unflatten(-1, (-1, size))


def _joined(blocks: Tensor, x: Tensor, dim: int) -> Tensor:
    return blocks.flatten(-2)[..., : x.shape[dim]].movedim(-1, dim).contiguous()
