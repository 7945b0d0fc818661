"""Reading a Hugging Face folder: its safetensors files as one mapping of names to tensors.

Tensors in block FP8 (DeepSeek-V3) and MXFP4 (gpt-oss) are de-quantised as they are read. Two stored
tensors present themselves as one:

    X [.., M, N] float8, X_scale_inv [.., M / 128, N / 128]    X = float8 * its block's scale
    X_blocks [E, N, M / 32, 16] uint8, X_scales [E, N, M / 32]  X [E, M, N], 2 values a byte,
                                                                groups of 32 with a power of 2
"""

import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.checkpoint.hf.pieces import Box
from titan_moe.checkpoint.hf.safetensors_file import Entry, read_box, read_header
from titan_moe.models.hf import read_settings
from titan_moe.runtime.errors import RunError, reason
from titan_moe.runtime.files import parse_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_PICKLES = ("*.bin", "*.pt", "*.pth")
_METHODS = ("fp8", "mxfp4")

Read = Callable[[str, Box], Tensor]

SCALE_INV = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# The 16 values of a 4-bit float with 2 bits of exponent and 1 of mantissa; OCP Microscaling
# Formats specification 1.0, section 5.3.3.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_GROUP = 32
_EXPONENT_BIAS = 127


class Info(NamedTuple):
    """What a folder says of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """Of the values that `read` gives."""


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


class HFFolder:
    """The tensors of a Hugging Face folder, read box by box; safetensors only.

    Quantised tensors present themselves as what they mean. Nothing is mapped into
    memory: what is read is what is held.

    Raises RunError, and ConfigError for a config.json that makes no sense, when the folder cannot
    be read or is quantised in a way that is not known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: dict[str, Any] = read_settings(path)
        self._stored = _stored(path)
        self._quantized: dict[str, Quantized] = {}
        self._descriptors: dict[Path, int] = {}
        block = _weight_block(self.settings, path)
        self._quantized, parts = _find_quantized(self._stored, block)
        self.tensors = {
            name: Info(entry.shape, entry.dtype)
            for name, entry in self._stored.items()
            if name not in parts
        } | {name: Info(q.shape, q.dtype) for name, q in self._quantized.items()}
        """All tensors by name."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(prod(e.shape) * e.dtype.itemsize for e in self._stored.values())

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor. Raises RunError when a file ends too early."""
        quantized = self._quantized.get(name)
        return self._read(name, box) if quantized is None else quantized.read(box, self._read)

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> "HFFolder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self, name: str, box: Box) -> Tensor:
        entry = self._stored[name]
        if entry.path not in self._descriptors:
            self._descriptors[entry.path] = os.open(entry.path, os.O_RDONLY)
        return read_box(self._descriptors[entry.path], entry, box)


def is_hf_folder(path: Path) -> bool:
    """Whether a folder has a config.json and no manifest of ours."""
    return (path / "config.json").is_file() and not (path / "manifest.json").exists()


def _stored(folder: Path) -> dict[str, Entry]:
    index = folder / INDEX
    if index.is_file():
        files = _indexed(index)
        found = {
            name: entry
            for file in sorted(set(files.values()))
            for name, entry in read_header(folder / file).items()
        }
        if missing := sorted(files.keys() - found.keys()):
            raise RunError(f"{index} names tensors that no file has: {', '.join(missing[:4])}")
        return found
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    others = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if others:
        raise RunError(
            f"{folder} has no safetensors but {others[0]}, a pickle, which could run any code: "
            "convert it first (transformers: save_pretrained), or download the safetensors files"
        )
    raise RunError(f"{folder} has no weights: neither {INDEX} nor {SINGLE}")


def _indexed(index: Path) -> Mapping[str, str]:
    try:
        files = parse_json(index.read_bytes())["weight_map"]
        # Nothing outside of the folder is ever ours.
        if any(Path(name).name != name for name in files.values()):
            raise ValueError("it names a file in another folder")
        return files
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{index} is damaged: {reason(error)}") from None


def _weight_block(settings: Mapping[str, Any], folder: Path) -> tuple[int, int] | None:
    """The block size of float8 weights, where there are any."""
    quantized = settings.get("quantization_config") or {}
    method = quantized.get("quant_method")
    if quantized and method not in _METHODS:
        raise RunError(
            f"{folder / 'config.json'}: quantization_config.quant_method={method!r} cannot be "
            f"de-quantised here, only {' or '.join(map(repr, _METHODS))}: name unquantised weights"
        )
    block = quantized.get("weight_block_size")
    if block is None:
        return None
    if not (isinstance(block, list) and len(block) == 2 and min(block) > 0):
        raise RunError(f"{folder / 'config.json'}: weight_block_size={block!r} must be two sizes")
    return int(block[0]), int(block[1])


def _find_quantized(
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
