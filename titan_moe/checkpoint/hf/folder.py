"""A Hugging Face folder: its safetensors files as one mapping of names to tensors.

Tensors in block FP8 (DeepSeek-V3), MXFP4 (gpt-oss) and packed int4 (Kimi-K2.5) are de-quantised as
they are read. Two stored tensors make one:

    X [.., M, N] float8, X_scale_inv [.., M / 128, N / 128]    X = float8 * its block's scale
    X_blocks [E, N, M / 32, 16] uint8, X_scales [E, N, M / 32]  X [E, M, N], 2 values a byte,
                                                                groups of 32 with a power of 2
    X_packed [M, N / 8] int32, X_scale [M, N / G]       X [M, N], 8 values a number, groups of G
"""

import json
import logging
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from titan_moe.checkpoint.digests import MANIFEST
from titan_moe.distributed.boxes import Box
from titan_moe.models.hf import CONFIG, read_settings, weight_block, wrapper_of
from titan_moe.runtime.errors import RunError, reason
from titan_moe.runtime.files import fsync

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
PUBLISHED_INDEX = "published.index.json"
"""Beside an imported checkpoint: the index of the folder that it was made of."""
SINGLE = "model.safetensors"
WIDER = "export a wider type, or an earlier step"
"""The remedy for an export whose values are not finite."""
REST = "rest.safetensors"
"""Beside an imported checkpoint: the tensors of the published model around its text model."""
_SCALE_INV = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"

_TEXT = "text"
_PICKLES = ("*.bin", "*.pt", "*.pth")
# The 16 values of a 4-bit float with 2 bits of exponent and 1 of mantissa; OCP Microscaling
# Formats specification 1.0, section 5.3.3.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_GROUP = 32
_EXPONENT_BIAS = 127

Read = Callable[[str, Box], Tensor]
Shape = tuple[int, ...]
Block = tuple[int, int] | None


class Quantized(NamedTuple):
    """A tensor that is read in another form than it is stored in."""

    shape: Shape
    dtype: torch.dtype
    """The type of the values that `read` returns."""
    read: Callable[[Box, Read], Tensor]
    """Returns the values of a box; takes what reads boxes of stored tensors."""


def _float8(name: str, shape: Shape, scales: Shape, block: Block) -> Quantized:
    """A block-quantised float8 tensor, read as float32, which holds the products. Raises RunError
    for scales that are not of these values."""
    if block is None:
        raise RunError(
            f"{name} is float8, and config.json's quantization_config has no weight_block_size"
        )
    blocks = [-(-size // by) for size, by in zip(shape[-2:], block, strict=True)]
    if scales != (*shape[:-2], *blocks):
        raise RunError(
            f"{name}{_SCALE_INV} has shape {list(scales)}, but {list(shape)} in blocks of "
            f"{list(block)} needs {[*shape[:-2], *blocks]}"
        )
    height, width = block

    def dequantized(box: Box, read: Read) -> Tensor:
        *outer, rows, columns = box
        blocks = (*outer, _groups(rows, height), _groups(columns, width))
        scales = read(name + _SCALE_INV, blocks).float()
        scales = _spread(_spread(scales, -2, rows, height), -1, columns, width)
        return read(name, box).float().mul_(scales)

    return Quantized(shape, torch.float32, dequantized)


def _mxfp4(name: str, shape: Shape, scales: Shape, block: Block) -> Quantized:
    """An MXFP4 tensor, read, exactly, as the transposed bfloat16 tensor that transformers makes of
    it. Raises RunError for scales that are not of these values."""
    if len(shape) != 4 or shape[-1] != _GROUP // 2 or scales != shape[:-1]:
        raise RunError(
            f"{name}: {_BLOCKS} {list(shape)} and {_SCALES} {list(scales)} are not those of MXFP4"
        )
    num_experts, num_rows, num_groups, _ = shape

    def dequantized(box: Box, read: Read) -> Tensor:
        experts, inner, rows = box
        groups = _groups(inner, _GROUP)
        scales = read(name + _SCALES, (experts, rows, groups))
        packed = read(name + _BLOCKS, (experts, rows, groups, slice(0, _GROUP // 2)))
        # Each byte holds two values, the first of them in its lower half.
        table = torch.tensor([[_FP4[byte & 15], _FP4[byte >> 4]] for byte in range(256)])
        values = table[packed.int()].flatten(-2)
        values = torch.ldexp(values, scales.int()[..., None] - _EXPONENT_BIAS)
        first = groups.start * _GROUP
        inside = slice(inner.start - first, inner.stop - first)
        return values.bfloat16().flatten(-2)[..., inside].transpose(-1, -2)

    return Quantized((num_experts, num_groups * _GROUP, num_rows), torch.bfloat16, dequantized)


def _int4(name: str, shape: Shape, scales: Shape, block: Block) -> Quantized:
    """A tensor of 4-bit integers, as the package compressed-tensors packs them, read as float32,
    which holds the products. Raises RunError for scales that are not of these values."""
    num_rows, numbers = shape
    if len(scales) != 2 or scales[0] != num_rows or numbers * 8 % scales[1]:
        raise RunError(
            f"{name}: {_PACKED} {list(shape)} and {_SCALE} {list(scales)} do not belong together"
        )
    group = numbers * 8 // scales[1]

    def dequantized(box: Box, read: Read) -> Tensor:
        rows, columns = box
        packed = _groups(columns, 8)
        numbers = read(name + _PACKED, (rows, packed))
        # The first value is in the lowest bits; all are 8 too large.
        values = ((numbers[..., None] >> torch.arange(0, 32, 4)) & 15).flatten(-2) - 8
        first = packed.start * 8
        scales = read(name + _SCALE, (rows, _groups(columns, group))).float()
        inside = values[:, columns.start - first : columns.stop - first]
        return inside.float().mul_(_spread(scales, -1, columns, group))

    return Quantized((num_rows, numbers * 8), torch.float32, dequantized)


# Endings of the names of quantised values -> their types, and endings of what belongs to them, the
# scales first.
_QUANTIZED: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[..., Quantized]]] = {
    "": (("F8_E4M3", "F8_E5M2"), (_SCALE_INV,), _float8),
    _BLOCKS: (("U8",), (_SCALES,), _mxfp4),
    _PACKED: (("I32",), (_SCALE, _SHAPE), _int4),
}


def _groups(values: slice, size: int) -> slice:
    """Returns the groups of `size` values that hold a range of values."""
    return slice(values.start // size, (values.stop - 1) // size + 1)


def _spread(scales: Tensor, dim: int, values: slice, size: int) -> Tensor:
    """Repeats along a dim the scale of each group for those of its values that are in a range."""
    index = torch.arange(values.start, values.stop) // size - values.start // size
    return scales.index_select(dim, index)


class HFFolder:
    """The tensors of a Hugging Face folder, read box by box; safetensors only.

    Raises RunError when the folder cannot be read, and ConfigError for a config.json that makes no
    sense or says that weights are quantised in a way that is not known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: dict[str, Any] = read_settings(path)
        files = _files(path)
        self.num_bytes = sum(file.stat().st_size for file in files)
        """Bytes of all tensor files."""
        self._slices: dict[str, Any] = {}
        for file, slices in files.items():
            if twice := sorted(self._slices.keys() & slices):
                raise RunError(f"{file} and another file have a tensor {twice[0]}: remove one")
            self._slices |= slices
        self._files = {name: file for file, slices in files.items() for name in slices}
        block = weight_block(self.settings, path / CONFIG)
        self._quantized: dict[str, Quantized] = {}
        hidden: set[str] = set()
        for stored, values in self._slices.items():
            for ending, (types, others, make) in _QUANTIZED.items():
                if stored.endswith(ending) and values.get_dtype() in types:
                    name = stored.removesuffix(ending)
                    shapes = self._shape(stored), self._scales(name, stored, others[0])
                    self._quantized[name] = make(name, *shapes, block)
                    self._files[name] = self._files[stored]
                    hidden |= {stored, *(name + other for other in others)}
        self.shapes = {name: self._shape(name) for name in self._slices if name not in hidden}
        self.shapes |= {name: tensor.shape for name, tensor in self._quantized.items()}
        """Shapes of all tensors by name."""

    def rest(self) -> dict[str, Any]:
        """The tensors around the text model by name, as they are stored: slices of the library."""
        wrapper = wrapper_of(self.settings)
        patterns = () if wrapper is None else wrapper.rest
        return {
            name: stored
            for name, stored in self._slices.items()
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        }

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all other tensors: in a file REST, of those that were beside it."""
        if (self.path / REST).is_file():
            with safe_open(self.path / REST, "pt") as file:
                found = json.loads(file.metadata()[_TEXT])
            return {name: tuple(shape) for name, shape in found.items()}
        return {name: self.shapes[name] for name in self.shapes.keys() - self.rest().keys()}

    def save_rest(self, path: Path) -> None:
        """Write the tensors around the text model, if there are any, for `rest` to read."""
        if tensors := {name: stored[()] for name, stored in self.rest().items()}:
            save(tensors, path / REST, {_TEXT: json.dumps(self.text_shapes())})

    def read(self, name: str, box: Box) -> Tensor:
        """Returns the values of a box, whose slices may have steps. Raises RunError for values that
        are not finite, by themselves or by their scales."""
        around = tuple(slice(along.start, along.stop) for along in box)
        quantized = self._quantized.get(name)
        values = quantized.read(around, self._read) if quantized else self._read(name, around)
        # A table names experts of token ids.
        if not (values.is_floating_point() or name.endswith(".tid2eid")):
            raise RunError(f"{self.path}: {name} holds {values.dtype}: name unquantised weights")
        refuse_not_finite(values, f"{self._files[name]}: {name}")
        return values[tuple(slice(None, None, along.step) for along in box)]

    def dtype(self, name: str) -> torch.dtype:
        """Returns the type of what `read` returns."""
        quantized = self._quantized.get(name)
        return quantized.dtype if quantized else dtype_of(self._slices[name])

    def _read(self, name: str, box: Box) -> Tensor:
        try:
            return self._slices[name][box]
        except SafetensorError as error:
            raise RunError(f"{self.path}: {name} cannot be read: {reason(error)}") from None

    def _scales(self, name: str, stored: str, suffix: str) -> tuple[int, ...]:
        """Returns the shape of the scales of a tensor, `stored` under another name or its own.
        Raises RunError where there are none, or the tensor is there twice."""
        if stored != name and name in self._slices:
            raise RunError(f"{self.path}: {name} and {stored} are both there: remove one")
        if name + suffix not in self._slices:
            raise RunError(f"{self.path}: {stored} is there without {name}{suffix}")
        return self._shape(name + suffix)

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())


def refuse_not_finite(
    values: Tensor, name: str, remedy: str = "download it again, or name other weights"
) -> None:
    """Raises RunError for a tensor with a value that is NaN or infinite, with which no step has a
    loss, nor says why."""
    # One pass: a core takes 0.1 s per GB of float32, 0.2 s of bfloat16 (a load, 0.4 s) and 0.8 s of
    # a transposed view, as MXFP4 is; `isfinite` takes 1.6 s and 2.6 s.
    if values.numel() and not all(bound.isfinite() for bound in values.aminmax()):
        dtype = str(values.dtype).removeprefix("torch.")
        raise RunError(f"{name} has values that are NaN or infinite in {dtype}: {remedy}")


def dtype_of(stored: Any) -> torch.dtype:
    """Returns the type of a slice of the library."""
    found: torch.dtype = (stored[0:0] if stored.get_shape() else stored[()]).dtype
    return found


def is_hf_folder(path: Path) -> bool:
    """Returns whether a folder has a config.json and no manifest.json."""
    return (path / CONFIG).is_file() and not (path / MANIFEST).exists()


def save(tensors: dict[str, Tensor], path: Path, facts: Mapping[str, str]) -> None:
    """Write a safetensors file and wait until it is on disk."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt", **facts})
    path.chmod(mode)  # The library's files are for their owner alone, whatever the umask.
    fsync(path)


def _files(folder: Path) -> dict[Path, dict[str, Any]]:
    """The slices of the tensors of each file."""
    index = folder / INDEX
    if index.is_file():
        named = _indexed(index)
        files = {folder / name: opened(folder / name) for name in sorted(set(named.values()))}
        if missing := sorted(named.keys() - {name for file in files.values() for name in file}):
            raise RunError(f"{index} names tensors that no file has: {', '.join(missing[:4])}")
        for file, slices in files.items():  # The index tells which of two files is read.
            files[file] = {
                n: stored for n, stored in slices.items() if named.get(n) in (None, file.name)
            }
    else:
        single = [folder / name for name in (SINGLE, REST) if (folder / name).is_file()]
        files = {path: opened(path) for path in single[:1]}
    if files:
        if unread := sorted(set(folder.glob("*.safetensors")) - files.keys()):
            names = ", ".join(path.name for path in unread)
            logger.warning("%s, %s: beside the weights, not read", folder, names)
        return files
    others = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if others:
        raise RunError(
            f"{folder} has no safetensors but {others[0]}, a pickle, which could run any code: "
            "convert it first (transformers: save_pretrained), or download the safetensors files"
        )
    raise RunError(f"{folder} has no weights: neither {INDEX} nor {SINGLE}")


def published_files(folder: Path) -> Mapping[str, str]:
    """Returns the file of each tensor as the folder's index says; of an import's, the index of the
    folder that it was made of; empty without one. Raises RunError for a damaged index."""
    found = [folder / name for name in (INDEX, PUBLISHED_INDEX) if (folder / name).is_file()]
    return _indexed(found[0]) if found else {}


def opened(path: Path) -> dict[str, Any]:
    """Returns the slices of a safetensors file's tensors, by name. Raises RunError."""
    try:
        # The slices keep the file open, which the library maps into memory.
        file = safe_open(path, "pt")
        return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} is damaged, or no safetensors file ({reason(error)})") from None


def _indexed(index: Path) -> Mapping[str, str]:
    try:
        files = json.loads(index.read_bytes())["weight_map"]
        # A folder is read alone, whatever its index says.
        if any(Path(name).name != name for name in files.values()):
            raise ValueError("it names a file in another folder")
        return files
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{index} is damaged: {reason(error)}") from None
