"""De-quantising as it is read: block FP8 (DeepSeek-V3) and MXFP4 (gpt-oss).

Two stored tensors present themselves as one:

    X [.., M, N] float8, X_scale_inv [.., M / 128, N / 128]    X = float8 * its block's scale
    X_blocks [E, N, M / 32, 16] uint8, X_scales [E, N, M / 32]  X [E, M, N], 2 values a byte,
                                                                groups of 32 with a power of 2
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from titan_moe.checkpoint.hf.pieces import Box
from titan_moe.checkpoint.hf.safetensors_file import Entry
from titan_moe.runtime.errors import RunError

Read = Callable[[str, Box], Tensor]

SCALE_INV = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# The 16 values of a 4-bit float with 2 bits of exponent and 1 of mantissa; OCP Microscaling
# Formats specification 1.0, section 5.3.3.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_GROUP = 32
_EXPONENT_BIAS = 127


class Tensor8(NamedTuple):
    """A block-quantised float8 tensor: it comes in float32, which holds the products."""

    name: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    dtype: torch.dtype = torch.float32

    def read(self, box: Box, read: Read) -> Tensor:
        """A box of its values."""
        *outer, rows, columns = box
        blocks = tuple(
            slice(part.start // size, (part.stop - 1) // size + 1)
            for part, size in zip((rows, columns), self.block, strict=True)
        )
        scales = read(self.name + SCALE_INV, (*outer, *blocks)).float()
        for dim, part, size, block in zip(
            (-2, -1), (rows, columns), self.block, blocks, strict=True
        ):
            index = torch.arange(part.start, part.stop, part.step or 1) // size - block.start
            scales = scales.index_select(dim, index)
        return read(self.name, box).float().mul_(scales)


class Tensor4(NamedTuple):
    """An MXFP4 tensor, as the transposed bfloat16 tensor that transformers makes of it; exact."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    def read(self, box: Box, read: Read) -> Tensor:
        """A box of its values."""
        experts, inner, rows = box
        groups = slice(inner.start // _GROUP, (inner.stop - 1) // _GROUP + 1)
        scales = read(self.name + SCALES, (experts, rows, groups))
        packed = read(self.name + BLOCKS, (experts, rows, groups, slice(0, _GROUP // 2)))
        # Of each byte both values, the first of them in its lower half.
        table = torch.tensor([[_FP4[byte & 15], _FP4[byte >> 4]] for byte in range(256)])
        values = table[packed.int()].flatten(-2)
        values = torch.ldexp(values, scales.int()[..., None] - _EXPONENT_BIAS)
        first = groups.start * _GROUP
        own = slice(inner.start - first, inner.stop - first, inner.step)
        return values.to(self.dtype).flatten(-2)[..., own].transpose(-1, -2)


Quantized = Tensor8 | Tensor4


def find_quantized(
    stored: Mapping[str, Entry], block: tuple[int, int] | None
) -> tuple[dict[str, Quantized], set[str]]:
    """The tensors that are stored quantised, and the names of all that they are stored in.

    Args:
        block: config.json's weight_block_size.

    Raises RunError for a half of a pair, or one that does not fit the other.
    """
    found: dict[str, Quantized] = {}
    parts: set[str] = set()
    for name, entry in stored.items():
        if entry.dtype in _FP8:
            found[name] = _tensor8(name, stored, block)
            parts |= {name, name + SCALE_INV}
        elif name.endswith(BLOCKS) and entry.dtype == torch.uint8:
            whole = name.removesuffix(BLOCKS)
            found[whole] = _tensor4(whole, stored)
            parts |= {name, whole + SCALES}
    return found, parts


def _tensor8(name: str, stored: Mapping[str, Entry], block: tuple[int, int] | None) -> Tensor8:
    scales, shape = stored.get(name + SCALE_INV), stored[name].shape
    if scales is None:
        raise RunError(f"{stored[name].path}: {name} is float8 without {name}{SCALE_INV}")
    if block is None:
        raise RunError(
            f"{name} is float8, and config.json's quantization_config has no weight_block_size"
        )
    blocks = [-(-size // by) for size, by in zip(shape[-2:], block, strict=True)]
    if len(shape) < 2 or scales.shape != (*shape[:-2], *blocks):
        raise RunError(
            f"{name}{SCALE_INV} is {list(scales.shape)} where {list(shape)} in blocks of "
            f"{list(block)} wants {[*shape[:-2], *blocks]}"
        )
    return Tensor8(name, shape, block)


def _tensor4(name: str, stored: Mapping[str, Entry]) -> Tensor4:
    blocks, scales = stored[name + BLOCKS], stored.get(name + SCALES)
    if scales is None:
        raise RunError(f"{blocks.path}: {name}{BLOCKS} is there without {name}{SCALES}")
    *outer, half = blocks.shape
    if len(outer) != 3 or half != _GROUP // 2 or scales.shape != tuple(outer):
        raise RunError(
            f"{name}: {BLOCKS} {list(blocks.shape)} and {SCALES} {list(scales.shape)} are not "
            "those of MXFP4"
        )
    experts, rows, groups = outer
    return Tensor4(name, (experts, groups * _GROUP, rows))
