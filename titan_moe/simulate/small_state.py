"""Tensors of the names and layouts of a model in a fake world, with values, of a few elements each.

A checkpoint's collectives follow from who holds which part of which tensor, not from how large the
parts are.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from titan_moe.distributed.boxes import sizes
from titan_moe.distributed.dtensor import mesh_rank, sharding_of


def small_modules(states: Iterable[dict[str, Tensor]]) -> list[nn.Module]:
    """A module for each of these state_dicts, whose own has the same names.

    A parameter under two names stays one. Call it where no mode makes fake tensors.
    """
    copies: dict[Tensor, Tensor] = {}
    return [_small_module(state, copies) for state in states]


def _small_module(state: dict[str, Tensor], copies: dict[Tensor, Tensor]) -> nn.Module:
    whole = nn.Module()
    for name, tensor in state.items():
        if tensor not in copies:
            copies[tensor] = _small(tensor)
        *path, last = name.split(".")
        module = whole
        for piece in path:
            if piece not in module._modules:
                module.add_module(piece, nn.Module())
            module = module.get_submodule(piece)
        copy = copies[tensor]
        if isinstance(copy, nn.Parameter):
            module.register_parameter(last, copy)
        else:
            module.register_buffer(last, copy)
    return whole


def _small(tensor: Tensor) -> Tensor:
    """Zeros, cut over the same axes."""
    sharding, axes = sharding_of(tensor)
    parts = [prod(axes[axis] for axis in cut) for cut in sharding.cuts]
    shape = _small_shape(tensor.shape, parts)
    rank = mesh_rank(tensor.device_mesh) if isinstance(tensor, DTensor) else 0
    small = torch.zeros(sizes(sharding.box(rank, shape, axes)), dtype=tensor.dtype)
    if isinstance(tensor, DTensor):
        stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        meta = TensorMeta(torch.Size(shape), stride, tensor.dtype)
        small = DTensor(small, replace(tensor._spec, tensor_meta=meta), requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(small, requires_grad=tensor.requires_grad)
    return small


def _small_shape(shape: Sequence[int], parts: Sequence[int]) -> tuple[int, ...]:
    """As few elements as leave one for each part, and parts as unequal as they are."""
    counts = [*parts, *[1] * (len(shape) - len(parts))]
    return tuple(min(size, n + size % n) for size, n in zip(shape, counts, strict=True))
