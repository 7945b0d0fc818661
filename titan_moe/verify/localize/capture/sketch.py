"""Sketches: what stands for a tensor in a capture, and adds up over the tensor's parts.

A sketch is 1 + P numbers in float64: the sum of squares, and P sums of the elements with random
signs, which belong to the elements' places in the whole tensor. Sums over parts of a tensor are the
whole's, however the parts are held, and of sums of tensors, all but the first number are the sum's.
The mean square of the P sums estimates the sum of squares; that of a difference of two sketches
does so for the difference of the two tensors, so none can hide (Alon, Matias and Szegedy 1999).
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

ROW_SIGNS = 8
"""P of a token's sketch: one estimates a norm to a third, hundreds of them to a few percent."""
BOX_SIGNS = 64
"""P of a parameter's: to a sixth."""
_CHUNK = 1 << 24
"""Elements that are held in float64 at a time."""


@lru_cache(maxsize=256)
def _signs(first: int, size: int, width: int, salt: int) -> Tensor:
    """[size, width] of +1 and -1 for the places from `first` on, the same anywhere (splitmix64)."""
    places = np.arange(first * width, (first + size) * width, dtype=np.uint64)
    with np.errstate(over="ignore"):
        x = (places + np.uint64(1 + (salt << 40))) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits = (x >> np.uint64(63)).astype(np.float64)
    return torch.from_numpy(2 * bits - 1).view(size, width)


def sketch_rows(x_NF: Tensor, first: int = 0) -> Tensor:
    """A sketch of each row, [N, 1 + ROW_SIGNS]; of the whole's columns, those from `first` on."""
    columns_FP = _signs(first, x_NF.shape[1], ROW_SIGNS, 0).to(x_NF.device)
    step = max(1, _CHUNK // max(1, x_NF.shape[1]))
    parts = []
    for rows in x_NF.split(step):
        wide = rows.double()
        parts.append(torch.cat([wide.square().sum(1, keepdim=True), wide @ columns_FP], 1))
    return torch.cat(parts) if parts else x_NF.new_zeros((0, 1 + ROW_SIGNS), dtype=torch.float64)


def sketch_box(x: Tensor, box: Sequence[slice]) -> Tensor:
    """The sketch [1 + BOX_SIGNS] of a part of a tensor that lies at `box` in the whole.

    An element's sign is the product of one for each of its coordinates.
    """
    total = torch.zeros(1 + BOX_SIGNS, dtype=torch.float64, device=x.device)
    if not x.numel():
        return total
    by_dim = [
        _signs(span.start, span.stop - span.start, BOX_SIGNS, 1 + dim).to(x.device)
        for dim, span in enumerate(box)
    ]
    step = max(1, _CHUNK // max(1, x[0].numel()))
    for start in range(0, len(x), step):
        wide = x[start : start + step].double()
        y = wide @ by_dim[-1] if x.ndim > 1 else wide[:, None] * by_dim[0][start : start + step]
        for dim in range(x.ndim - 2, 0, -1):
            y = (y * by_dim[dim]).sum(-2)
        if x.ndim > 1:
            y = y * by_dim[0][start : start + step]
        total[0] += wide.square().sum()
        total[1:] += y.sum(0)
    return total


def sketch_experts(x: Tensor, box: Sequence[slice]) -> Tensor:
    """A sketch of each expert of a part of a stack, [E, 1 + BOX_SIGNS]."""
    if not len(x):
        return torch.zeros(0, 1 + BOX_SIGNS, dtype=torch.float64, device=x.device)
    return torch.stack([sketch_box(one, box[1:]) for one in x])
