"""Reading a Hugging Face folder: its safetensors files as one mapping of names to tensors."""

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.checkpoint.hf.pieces import Box
from titan_moe.checkpoint.hf.quantized import Quantized, find_quantized
from titan_moe.checkpoint.hf.safetensors_file import Entry, read_box, read_header
from titan_moe.models.hf import read_settings
from titan_moe.runtime.errors import RunError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_PICKLES = ("*.bin", "*.pt", "*.pth")
_METHODS = ("fp8", "mxfp4")


class Info(NamedTuple):
    """What a folder says of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """Of the values that `read` gives."""


class HFFolder:
    """The tensors of a Hugging Face folder, read box by box; safetensors only.

    Quantised tensors (quantized.py) present themselves as what they mean. Nothing is mapped into
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
        self._quantized, parts = find_quantized(self._stored, block)
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
        files = json.loads(index.read_bytes())["weight_map"]
        # Nothing outside of the folder is ever ours.
        if any(Path(name).name != name for name in files.values()):
            raise ValueError("it names a file in another folder")
        return files
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{index} is damaged: {type(error).__name__}: {error}") from None


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
