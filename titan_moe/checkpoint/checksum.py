"""Checksums of tensors that do not depend on how ranks hold them.

The checksum of a tensor is the sum over its elements of bits(i) * weight(i), modulo 2^64, where i
is the element's index in the flattened *global* tensor and weight(i) is odd and scrambled. A sum
can be taken shard by shard, in any order. An odd weight cannot cancel a flipped bit, and unequal
weights notice elements that changed places.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.distributed.dtensor import local_part, local_slices
from titan_moe.runtime.errors import RunError

# Elements looked at together. On a CPU the few int64 temporaries then stay in the cache; a GPU
# wants long kernels instead, at the price of about 3 * 8 bytes an element.
_CHUNK_CPU = 2**16
_CHUNK_GPU = 2**24

_SAME_SIZE_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# 2^64 divided by the golden ratio, signed: consecutive indices spread over all 64 bits.
_SCRAMBLE = 0x9E3779B97F4A7C15 - 2**64
_BITS = 64
_NAMED = 8
"""Tensors that a message names."""


def checksums(tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Checksum of every tensor as 16 hex digits, by name; collective, with one all-reduce for all.

    `tensors` are the ones this rank holds: DTensors of any mesh, or plain tensors, which count as
    whole replicas. `shapes` are the global shapes of all ranks' tensors, the same mapping on every
    rank.

    Raises RunError on all ranks when replicas of a tensor differ, naming tensors and ranks.
    """
    if not shapes:
        return {}
    names = sorted(shapes)
    device = torch.device("cuda" if "nccl" in dist.get_backend_config() else "cpu")
    sums = torch.zeros(len(names), dtype=torch.int64, device=device)
    held = torch.zeros_like(sums)
    for row, name in enumerate(names):
        if name in tensors:
            local = local_part(tensors[name]).detach()
            box = local_slices(tensors[name])
            lengths = tuple(part.stop - part.start for part in box)
            assert lengths == tuple(local.shape), f"{name}: shard of {local.shape}, not {lengths}"
            held[row] = local.numel()
            sums[row] = _sum_box(local, [part.start for part in box], _strides(shapes[name]))

    # Per tensor, how many ranks' sums have bit 0, bit 1, ... set. With c replicas of every shard
    # each of these counts is c times what one replica gives: exact to divide, and a remainder
    # shows replicas that differ. No rank needs to know what the others hold.
    positions = torch.arange(_BITS, device=device)
    totals = torch.cat([(sums[:, None] >> positions) & 1, held[:, None]], dim=1)
    dist.all_reduce(totals)
    bit_counts, held = totals[:, :_BITS], totals[:, _BITS:]
    numel = torch.tensor([[prod(shapes[name])] for name in names], device=device).clamp(min=1)
    assert bool((held % numel == 0).all()), "ranks hold parts of a tensor unequally often"
    replicas = (held // numel).clamp(min=1)
    if (differ := (bit_counts % replicas != 0).any(dim=1)).any():
        found = [name for name, bad in zip(names, differ.tolist(), strict=True) if bad]
        own = {
            (name, str(local_slices(tensors[name]))): int(sums[names.index(name)])
            for name in found
            if name in tensors
        }
        raise RunError(
            "ranks hold different values of what should be replicas: " + _unlike(found, own)
        )
    result = (bit_counts // replicas << positions).sum(dim=1)
    return {name: as_digits(value) for name, value in zip(names, result.tolist(), strict=True)}


def _unlike(names: Sequence[str], own: Mapping[tuple[str, str], int]) -> str:
    """Which ranks differ in the tensors of these names, from each rank's own sum by name and box;
    collective."""
    everyone: list[Mapping[tuple[str, str], int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    lines = []
    for name in names[:_NAMED]:
        holders: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, sums in enumerate(everyone):
            for (held, box), value in sums.items():
                if held == name:
                    holders[box][value].append(rank)
        # Of two values the rarer one is more likely the wrong one: it comes first.
        apart = [sorted(by.values(), key=len) for by in holders.values() if len(by) > 1]
        ranks = "; ".join(" unlike ".join(map(_ranks, alike)) for alike in apart)
        lines.append(f"{name} ({ranks})")
    more = len(names) - _NAMED
    return ", ".join(lines) + (f" and {more} more" if more > 0 else "")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def box_sum(box: Tensor, origin: Sequence[int], shape: Sequence[int]) -> int:
    """What a box at `origin` of a tensor of `shape` adds to the tensor's sum."""
    return int(_sum_box(box, origin, _strides(shape)))


def as_digits(total: int) -> str:
    """The checksum of a tensor whose boxes add up to `total`."""
    return f"{total % 2**_BITS:016x}"


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Distance in the flattened global tensor between neighbours along each dim."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _sum_box(box: Tensor, offset: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Sum of bits * weight over a box of the global tensor, as a 0-dim int64 tensor."""
    if not box.is_cuda and _is_run(box, strides):
        start = sum(at * stride for at, stride in zip(offset, strides, strict=True))
        return _sum_run(box.reshape(-1), start)
    limit = _CHUNK_GPU if box.is_cuda else _CHUNK_CPU
    if box.numel() > limit:
        dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
        # Whole chunks along the first dim worth cutting.
        step = max(1, limit // (box.numel() // box.shape[dim]))
        total = torch.zeros((), dtype=torch.int64, device=box.device)
        for start, part in zip(
            range(0, box.shape[dim], step), torch.split(box, step, dim), strict=True
        ):
            shifted = [at + start * (d == dim) for d, at in enumerate(offset)]
            total += _sum_box(part, shifted, strides)
        return total
    weight = torch.zeros((), dtype=torch.int64, device=box.device)
    for dim, (size, at, stride) in enumerate(zip(box.shape, offset, strides, strict=True)):
        index = torch.arange(at, at + size, device=box.device) * stride
        weight = weight + index.view(-1, *[1] * (box.ndim - 1 - dim))
    weight = (weight + 1) * _SCRAMBLE
    weight ^= weight >> 32
    weight |= 1
    return weight.mul_(_bits(box)).sum()


def _is_run(box: Tensor, strides: Sequence[int]) -> bool:
    """Whether a box's elements lie one after the other in the flattened global tensor too."""
    return box.is_contiguous() and all(
        prod(box.shape[:dim]) <= 1 or strides[dim - 1] == strides[dim] * box.shape[dim]
        for dim in range(1, box.ndim)
    )


def _sum_run(run: Tensor, start: int) -> Tensor:
    """`_sum_box` of elements start, start + 1, ... on a CPU, in half the time: the products with
    the scramble are those of the first chunk, shifted."""
    first = torch.arange(1, min(len(run), _CHUNK_CPU) + 1) * _SCRAMBLE
    weights, shifted, bits = (torch.empty_like(first) for _ in range(3))
    total = torch.zeros((), dtype=torch.int64)
    for at in range(0, len(run), _CHUNK_CPU):
        chunk = _bits(run[at : at + _CHUNK_CPU])
        number = len(chunk)
        weight, half = weights[:number], shifted[:number]
        torch.add(first[:number], _signed((start + at) * _SCRAMBLE), out=weight)
        torch.bitwise_right_shift(weight, 32, out=half)
        weight.bitwise_xor_(half).bitwise_or_(1)
        total += torch.dot(weight, bits[:number].copy_(chunk))
    return total


def _signed(number: int) -> int:
    """A number modulo 2^64 as an int64 holds it."""
    number %= 2**_BITS
    return number - 2**_BITS if number >= 2 ** (_BITS - 1) else number


def _bits(box: Tensor) -> Tensor:
    """The elements' bits, as integers."""
    bits = box.view(_SAME_SIZE_INTEGER[box.element_size()])
    if box.element_size() == 8:
        # A round float64 has bits at the top only, which a product modulo 2^64 mostly drops.
        return bits ^ ((bits >> 32) & 0xFFFFFFFF)
    return bits
