"""Checksums of tensors that do not depend on how ranks hold them: see box_sums.py."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint.box_sums import (
    BITS,
    SCRAMBLE,
    join_sums,
    strides_of,
    sum_box,
    unlike_replicas,
)
from titan_moe.checkpoint.tensors import as_array
from titan_moe.distributed.dtensor import local_part, local_slices

# Elements that a GPU looks at together: long kernels, at the price of about 3 * 8 bytes an element.
_CHUNK = 2**24

_SAME_SIZE_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Checksum of every tensor as 16 hex digits, by name; collective, with one all-reduce for all.

    `tensors` are the ones this rank holds: DTensors of any mesh, or plain tensors, which count as
    whole replicas. `shapes` are the global shapes of all ranks' tensors, the same mapping on every
    rank.

    Raises RunError on all ranks when replicas of a tensor differ, naming tensors and ranks.
    """
    if not shapes:
        return {}
    ordered = {name: shapes[name] for name in sorted(shapes)}
    device = torch.device("cuda" if "nccl" in dist.get_backend_config() else "cpu")
    sums = torch.zeros(len(ordered), dtype=torch.int64, device=device)
    held = torch.zeros_like(sums)
    for row, (name, shape) in enumerate(ordered.items()):
        if name in tensors:
            local = local_part(tensors[name]).detach()
            box = local_slices(tensors[name])
            lengths = tuple(part.stop - part.start for part in box)
            assert lengths == tuple(local.shape), f"{name}: shard of {local.shape}, not {lengths}"
            held[row] = local.numel()
            sums[row] = _sum(local, [part.start for part in box], shape)
    positions = torch.arange(BITS, device=device)
    totals = torch.cat([(sums[:, None] >> positions) & 1, held[:, None]], dim=1)
    dist.all_reduce(totals)
    counts = totals.cpu().numpy()
    joined, unlike = join_sums(counts[:, :BITS], counts[:, BITS], ordered)
    if unlike:
        own = {
            (name, str(local_slices(tensors[name]))): int(sums[row])
            for row, name in enumerate(ordered)
            if name in unlike and name in tensors
        }
        everyone: list[Mapping[tuple[str, str], int]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        raise unlike_replicas(unlike, everyone)
    return joined


def box_sum(box: Tensor, origin: Sequence[int], shape: Sequence[int]) -> int:
    """What a box at `origin` of a tensor of `shape` adds to the tensor's sum."""
    return int(_sum(box, origin, shape))


def as_integers(tensor: Tensor) -> Tensor:
    """The elements' bits, as integers of their size, sharing memory."""
    return tensor.view(_SAME_SIZE_INTEGER[tensor.element_size()])


def _sum(box: Tensor, origin: Sequence[int], shape: Sequence[int]) -> Tensor | int:
    if box.is_cuda:
        return _sum_on_device(box, origin, strides_of(shape))
    return sum_box(as_array(as_integers(box)), origin, shape)


def _sum_on_device(box: Tensor, offset: Sequence[int], strides: Sequence[int]) -> Tensor:
    """`sum_box` on a GPU, as a 0-dim int64 tensor: nothing waits for it."""
    if box.numel() > _CHUNK:
        dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
        # Whole chunks along the first dim worth cutting.
        step = max(1, _CHUNK // (box.numel() // box.shape[dim]))
        total = torch.zeros((), dtype=torch.int64, device=box.device)
        for start, part in zip(
            range(0, box.shape[dim], step), torch.split(box, step, dim), strict=True
        ):
            shifted = [at + start * (d == dim) for d, at in enumerate(offset)]
            total += _sum_on_device(part, shifted, strides)
        return total
    weight = torch.zeros((), dtype=torch.int64, device=box.device)
    for dim, (size, at, stride) in enumerate(zip(box.shape, offset, strides, strict=True)):
        index = torch.arange(at, at + size, device=box.device) * stride
        weight = weight + index.view(-1, *[1] * (box.ndim - 1 - dim))
    weight = (weight + 1) * SCRAMBLE
    weight ^= weight >> 32
    weight |= 1
    return weight.mul_(_bits(box)).sum()


def _bits(box: Tensor) -> Tensor:
    bits = as_integers(box)
    if box.element_size() == 8:
        # As in box_sums.
        return bits ^ ((bits >> 32) & 0xFFFFFFFF)
    return bits
