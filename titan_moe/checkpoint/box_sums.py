"""What a part of a tensor adds to the tensor's checksum; no torch, for the process that writes.

The checksum of a tensor is the sum over its elements of bits(i) * weight(i), modulo 2^64, where i
is the element's index in the flattened *global* tensor and weight(i) is odd and scrambled. A sum
can be taken part by part, in any order. An odd weight cannot cancel a flipped bit, and unequal
weights notice elements that changed places.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from titan_moe.runtime.errors import RunError

# Elements looked at together: the int64 temporaries then stay in the cache.
_CHUNK = 2**16
# 2^64 divided by the golden ratio, signed: consecutive indices spread over all 64 bits.
SCRAMBLE = 0x9E3779B97F4A7C15 - 2**64
BITS = 64
_NAMED = 8
"""Tensors that a message names."""

Integers = NDArray[np.signedinteger]


def sum_box(box: Integers, origin: Sequence[int], shape: Sequence[int]) -> int:
    """Sum of bits * weight over a box at `origin` of a tensor of `shape`, signed.

    Args:
        box: the elements' bits, as integers of their size.
    """
    strides = strides_of(shape)
    start = sum(at * stride for at, stride in zip(origin, strides, strict=True))
    if box.flags.c_contiguous and _is_run(box.shape, strides):
        return _signed(_sum_run(box.reshape(-1), start))
    return _signed(_sum_strided(box, start, strides))


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Distance in the flattened global tensor between neighbours along each dim."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def as_digits(total: int) -> str:
    """The checksum of a tensor whose boxes add up to `total`."""
    return f"{total % 2**BITS:016x}"


def count_bits(sums: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of the sums [..., rank, tensor] have bit 0, bit 1, ... set: [..., tensor, bit]."""
    return ((sums[..., None] >> np.arange(BITS)) & 1).sum(axis=-3)


def join_sums(
    bit_counts: NDArray[np.int64], held: NDArray[np.int64], shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, str], list[str]]:
    """Checksum of every tensor as 16 hex digits, by name, from the sums of all ranks' parts; and
    the tensors whose replicas differ.

    With c replicas of every shard each count is c times what one replica gives: exact to divide,
    and a remainder shows replicas that differ. No rank needs to know what the others hold.

    Args:
        bit_counts: of the tensors in the order of `shapes`, as count_bits gives them.
        held: elements of each tensor, over all ranks.
    """
    numel = np.array([max(prod(shape), 1) for shape in shapes.values()], dtype=np.int64)
    assert bool((held % numel == 0).all()), "ranks hold parts of a tensor unequally often"
    replicas = np.maximum(held // numel, 1)[:, None]
    differ = (bit_counts % replicas != 0).any(axis=1)
    totals = (bit_counts // replicas << np.arange(BITS)).sum(axis=1)
    joined = {name: as_digits(int(total)) for name, total in zip(shapes, totals, strict=True)}
    return joined, [name for name, bad in zip(shapes, differ, strict=True) if bad]


def unlike_replicas(
    names: Sequence[str], everyone: Sequence[Mapping[tuple[str, str], int]]
) -> RunError:
    """Which ranks differ in the tensors of these names, from each rank's own sum by name and
    box."""
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
    return RunError(
        "ranks hold different values of what should be replicas: "
        + ", ".join(lines)
        + (f" and {more} more" if more > 0 else "")
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def unlike_copies(groups: Sequence[Sequence[str]], sums: Mapping[str, str]) -> list[str]:
    """Copies of a tied weight begin and are updated alike: a line for each that is not, by all
    tensors' checksums."""
    lines = []
    for first, *copies in groups:
        if differ := [_in_model(name) for name in copies if sums[name] != sums[first]]:
            lines.append(f"{_in_model(first)} and its copies {', '.join(differ)} are not the same")
    return lines


def _in_model(name: str) -> str:
    return name.removeprefix("model.")


def _is_run(lengths: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a box's elements lie one after the other in the flattened global tensor too."""
    return all(
        prod(lengths[:dim]) <= 1 or strides[dim - 1] == strides[dim] * lengths[dim]
        for dim in range(1, len(lengths))
    )


def _sum_run(run: Integers, start: int) -> int:
    """`sum_box` of elements start, start + 1, ...: the products with the scramble are those of the
    first chunk, shifted."""
    first = np.arange(1, min(len(run), _CHUNK) + 1) * np.int64(SCRAMBLE)
    weights, shifted, bits = (np.empty_like(first) for _ in range(3))
    total = 0
    for at in range(0, len(run), _CHUNK):
        chunk = run[at : at + _CHUNK]
        number = len(chunk)
        weight, half, bit = weights[:number], shifted[:number], bits[:number]
        np.add(first[:number], np.int64(_signed((start + at) * SCRAMBLE)), out=weight)
        np.right_shift(weight, 32, out=half)
        np.bitwise_xor(weight, half, out=weight)
        np.bitwise_or(weight, 1, out=weight)
        bit[:] = _spread(chunk)
        total += int(np.dot(weight, bit))
    return total


def _sum_strided(box: Integers, start: int, strides: Sequence[int]) -> int:
    if box.size > _CHUNK:
        dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
        step = max(1, _CHUNK // (box.size // box.shape[dim]))  # Whole chunks along that dim.
        before = (slice(None),) * dim
        total = 0
        for at in range(0, box.shape[dim], step):
            part = (*before, slice(at, at + step))
            total += _sum_strided(box[part], start + at * strides[dim], strides)
        return total
    weight = np.full((), start + 1, dtype=np.int64)
    for dim, (size, stride) in enumerate(zip(box.shape, strides, strict=True)):
        index = np.arange(size, dtype=np.int64) * stride
        weight = weight + index.reshape(-1, *[1] * (box.ndim - 1 - dim))
    weight = np.atleast_1d(weight) * np.int64(SCRAMBLE)
    weight ^= weight >> 32
    weight |= 1
    return int((weight * _spread(box)).sum(dtype=np.int64))


def _spread(bits: Integers) -> Integers:
    """A round float64 has bits at the top only, which a product modulo 2^64 mostly drops."""
    return bits ^ ((bits >> 32) & 0xFFFFFFFF) if bits.itemsize == 8 else bits


def _signed(number: int) -> int:
    """A number modulo 2^64 as an int64 holds it."""
    number %= 2**BITS
    return number - 2**BITS if number >= 2 ** (BITS - 1) else number
