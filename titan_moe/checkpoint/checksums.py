"""Checksums of tensors that do not depend on the layout, and the comparison of replicas.

The checksum of a tensor is the sum over its elements of bits(i) * weight(i), modulo 2^64. i is the
element's index in the flattened *global* tensor; weight(i) is odd and scrambled. The sum can be
taken box by box, in any order. An odd weight cannot cancel a flipped bit, and unequal weights
notice elements that changed places.
"""

import json
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from math import prod

import torch
from torch import Tensor

from titan_moe.checkpoint.tensors import MODEL, Chunk, held_chunks
from titan_moe.distributed.agreement import from_every_rank
from titan_moe.distributed.boxes import sizes
from titan_moe.distributed.dtensor import local_part
from titan_moe.models.config import ModelConfig, tied_weights
from titan_moe.runtime.errors import RunError, listed
from titan_moe.runtime.launch import ranks_in_words

# Elements summed together. On a CPU the int64 temporaries stay in the cache, and torch starts no
# threads for so few: waiting for them beside other work took 3 to 7 times as long. On a GPU kernels
# are long, at the price of about 32 bytes an element.
_BLOCK = {"cpu": 2**15, "cuda": 2**24}
# 2^64 divided by the golden ratio, signed: consecutive indices spread over all 64 bits.
_SCRAMBLE = 0x9E3779B97F4A7C15 - 2**64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns checksums of all ranks' tensors as 16 hex digits, by name; collective.

    `tensors` are this rank's: DTensors of any mesh, or plain tensors, which count as replicas.

    Raises RunError on all ranks when replicas of a tensor differ, naming tensors and ranks.
    """
    chunks = held_chunks(tensors)
    sums = [box_sum(local_part(tensors[each.name]).detach(), each) for each in chunks]
    # One copy from the device for all tensors.
    values = torch.stack(sums).tolist() if sums else []
    mine = [(each.name, str(each.box), value) for each, value in zip(chunks, values, strict=True)]
    everyone = from_every_rank(lambda: mine, doing="cannot compare checksums")
    holders: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, entries in enumerate(everyone):
        for name, box, value in entries:
            holders[name, box][value].append(rank)
    differ: dict[str, list[str]] = defaultdict(list)
    for (name, _), by_value in holders.items():
        if len(by_value) > 1:
            # The rarer value is more likely the wrong one: it comes first.
            groups = sorted(by_value.values(), key=len)
            differ[name].append(" unlike ".join(map(ranks_in_words, groups)))
    if differ:
        named = listed([f"{name} ({'; '.join(of)})" for name, of in differ.items()], most=8)
        raise RunError(f"ranks hold different values of what should be replicas: {named}")
    return total_sums((name, value) for (name, _), by in holders.items() for value in by)


def total_sums(sums: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Returns the checksum of each tensor as 16 hex digits, by name, from its boxes' sums."""
    totals: dict[str, int] = defaultdict(int)
    for name, value in sums:
        totals[name] += value
    return {name: f"{totals[name] % 2**64:016x}" for name in sorted(totals)}


def gather_sums(mine: Mapping[tuple[str, str], int], *, doing: str) -> dict[str, str]:
    """Returns the checksum of each tensor by name, from what every rank has read: sums by name and
    box, of which those of the same box count once. Collective."""
    sums = dict(ChainMap(*map(dict, from_every_rank(lambda: mine, doing=doing))))
    return total_sums((name, value) for (name, _), value in sums.items())


def joint_digest(sums: Mapping[str, str]) -> str:
    """Returns a digest of many tensors' checksums by name; empty where there are none."""
    text = json.dumps(dict(sums), sort_keys=True)
    return sha256(text.encode()).hexdigest() if sums else ""


def unlike_copies(config: ModelConfig, sums: Mapping[str, str]) -> list[str]:
    """Returns one error line per tied weight whose copies have different checksums; base
    weights of adapters have none."""
    lines = []
    for first, *copies in tied_weights(config):
        if differ := [name for name in copies if sums.get(MODEL + name) != sums.get(MODEL + first)]:
            lines.append(f"{first} and its copies {', '.join(differ)} are not the same")
    return lines


def box_sum(values: Tensor, chunk: Chunk) -> Tensor:
    """Returns what the values of a chunk add to the sum of its tensor: a 0-dim int64 tensor on the
    values' device, for which nothing waits."""
    assert tuple(values.shape) == sizes(chunk.box), f"{tuple(values.shape)} values of {chunk}"
    strides = [prod(chunk.shape[dim + 1 :]) for dim in range(len(chunk.shape))]
    start = sum(each.start * stride for each, stride in zip(chunk.box, strides, strict=True))
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    blocks = list(_blocks(values, strides, _BLOCK[values.device.type]))
    # Blocks differ by a constant only, but for the last ones, which are shorter.
    scrambled = _scrambled_offsets(blocks[0][1], strides)
    for offset, block in blocks:
        first = scrambled[tuple(map(slice, block.shape))]
        weight = first + _signed((start + offset + 1) * _SCRAMBLE)
        weight ^= weight >> 32
        weight |= 1
        total += weight.mul_(_bits(block)).sum()
    return total


def _blocks(values: Tensor, strides: Sequence[int], limit: int) -> Iterator[tuple[int, Tensor]]:
    """Yields (distance from the first element in the flattened global tensor, block) of at most
    `limit` elements each; the first block is the largest along every dim."""
    if values.numel() <= limit:
        yield 0, values
        return
    dim = next(dim for dim, size in enumerate(values.shape) if size > 1)
    step = max(1, limit // (values.numel() // values.shape[dim]))
    for number, piece in enumerate(values.split(step, dim)):
        for offset, block in _blocks(piece, strides, limit):
            yield number * step * strides[dim] + offset, block


def _scrambled_offsets(block: Tensor, strides: Sequence[int]) -> Tensor:
    """Returns each element's distance from the block's first one times `_SCRAMBLE`, modulo 2^64."""
    offsets = torch.zeros((), dtype=torch.int64, device=block.device)
    for size, stride in zip(block.shape, strides, strict=True):
        along = torch.arange(size, device=block.device) * _signed(stride * _SCRAMBLE)
        offsets = offsets.unsqueeze(-1) + along
    return offsets


def _signed(number: int) -> int:
    """Returns a number modulo 2^64 as an int64 holds it."""
    return (number + 2**63) % 2**64 - 2**63


def _bits(values: Tensor) -> Tensor:
    bits = values.view(_INTEGERS[values.element_size()])
    if values.element_size() == 8:
        # A round float64 has bits at the top only, which a product modulo 2^64 mostly drops.
        return bits ^ ((bits >> 32) & 0xFFFFFFFF)
    return bits
