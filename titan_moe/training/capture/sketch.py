"""Sketches: what stands for a tensor in a capture, and adds up over the tensor's shards.

A sketch is P numbers in float64: sums of the elements with random signs, which belong to the
elements' places in the whole tensor. So it is linear: the sketches of a tensor's shards, or of
tensors that are added, add up to the sketch of the whole. The mean square of the P sums estimates
the sum of squares; that of a difference of two sketches does so for the difference of the two
tensors, so none can hide (Alon, Matias and Szegedy 1999).
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

ROW_SIGNS = 8
"""P of a token's sketch: one estimates a norm to a third, hundreds of them to a few percent."""
BOX_SIGNS = 64
"""P of a parameter's sketch, which estimates a norm to a sixth."""
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
    """A sketch of each row, [N, ROW_SIGNS]; of the whole's columns, those from `first` on."""
    columns_FP = _signs(first, x_NF.shape[1], ROW_SIGNS, 0).to(x_NF.device)
    step = max(1, _CHUNK // max(1, x_NF.shape[1]))
    return torch.cat([rows_NF.double() @ columns_FP for rows_NF in x_NF.split(step)])


def sketch_box(x: Tensor, box: Sequence[slice]) -> Tensor:
    """The sketch [BOX_SIGNS] of a shard of a vector, a matrix or a convolution's weight [C, 1, W]
    that lies at `box` in the whole.

    An element's sign is the product of its row's and its column's.
    """
    if x.ndim == 1:
        x, box = x[:, None], (*box, slice(0, 1))
    elif x.ndim == 3:
        x, box = x.flatten(1), (box[0], box[2])
    rows_P, columns_P = (
        _signs(span.start, span.stop - span.start, BOX_SIGNS, 1 + dim).to(x.device)
        for dim, span in enumerate(box)
    )
    total = torch.zeros(BOX_SIGNS, dtype=torch.float64, device=x.device)
    step = max(1, _CHUNK // max(1, x.shape[1]))
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        total += (x[rows].double() @ columns_P * rows_P[rows]).sum(0)
    return total


def sketch_experts(x: Tensor, box: Sequence[slice]) -> Tensor:
    """A sketch of each expert of a shard of a stack, [E, BOX_SIGNS]."""
    if not len(x):
        return torch.zeros(0, BOX_SIGNS, dtype=torch.float64, device=x.device)
    return torch.stack([sketch_box(one, box[1:]) for one in x])
