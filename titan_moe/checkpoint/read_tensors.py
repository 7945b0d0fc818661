"""A checkpoint's tensors into memory: every part is read from disk by one rank, and handed on.

Replicas of data parallelism and tensors that every rank holds would otherwise be read as often as
they are held, and a layout other than the one that was saved would read parts that it drops.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint.safe_reader import SafeReader
from titan_moe.distributed.agreement import on_every_rank
from titan_moe.distributed.boxes import Box, sizes
from titan_moe.distributed.dtensor import local_part
from titan_moe.distributed.transfer import execute, parts_of
from titan_moe.distributed.transfer_plan import (
    BUCKET_BYTES,
    Held,
    Parts,
    by_box,
    by_name,
    overlaps,
    plan_parts,
)
from titan_moe.runtime.errors import RunError


class _Tensor(NamedTuple):
    """A tensor of the checkpoint: who reads which part of it, and who wants which."""

    name: str
    readers: Parts
    wanters: Parts


def read_tensors(
    tensors: Mapping[str, Tensor],
    reader: SafeReader,
    *,
    doing: str,
    max_bytes: int = BUCKET_BYTES,
) -> int:
    """Read into tensors of any layout, in place; returns the bytes that this rank has read.
    Collective.

    Args:
        doing: as on_every_rank's.
        max_bytes: what a rank reads at a time, if it reads no more of one tensor.

    Raises RunError on all ranks when the files have not all of a tensor, or are damaged.
    """
    rank, own = dist.get_rank(), parts_of(tensors)
    wanted: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(wanted, own)
    targets = {name: [(local_part(each).detach(), own[name].box)] for name, each in tensors.items()}
    everything = on_every_rank(lambda: _choose_readers(reader, wanted), doing=doing)
    read = 0
    for some in _rounds(everything, max_bytes):

        def read_mine(some: list[_Tensor] = some) -> dict[str, list[tuple[Tensor, Box]]]:
            return {each.name: _read(reader, each, rank) for each in some}

        sources = on_every_rank(read_mine, doing=doing)
        plan = plan_parts(
            {each.name: each.readers for each in some},
            {each.name: each.wanters for each in some},
            len(wanted),
            max_bytes=max_bytes,
        )
        execute(plan, sources, targets)
        read += sum(values.nbytes for parts in sources.values() for values, _ in parts)
    return read


def _choose_readers(reader: SafeReader, wanted: Sequence[Mapping[str, Held]]) -> list[_Tensor]:
    """The tensors that are wanted, in the order of the files. A stored box is read by the rank that
    wants most of it; of several alike, by the one that reads the least so far."""
    boxes = defaultdict(list)
    for name, box in reader.chunks(""):
        boxes[name].append(box)
    wanters = by_name(wanted)
    load = [0] * len(wanted)
    found = []
    for name in [*boxes, *(name for name in wanters if name not in boxes)]:
        if name not in wanters:
            continue
        like, wanting = wanters[name][0][1], by_box(wanters[name])
        stored = sum(prod(sizes(box)) for box in boxes[name])
        if stored != prod(like.shape):
            raise RunError(
                f"checkpoint {reader.path} is damaged: its files hold {stored} of the "
                f"{prod(like.shape)} elements of {name}"
            )
        parts = [like._replace(box=box) for box in boxes[name] if prod(sizes(box))]
        bounds = [tuple((each.start, each.stop) for each in part.box) for part in parts]
        _, _, shared = overlaps(bounds, list(wanting), len(like.shape))
        ranks, readers = list(wanting.values()), []
        for part, of_part in zip(parts, shared, strict=True):
            able = [rank for n in np.flatnonzero(of_part == of_part.max()) for rank in ranks[n]]
            best = min(able, key=lambda rank: (load[rank], rank))
            load[best] += part.bytes
            readers.append((best, part))
        found.append(_Tensor(name, readers, wanters[name]))
    return found


def _rounds(tensors: Sequence[_Tensor], max_bytes: int) -> list[list[_Tensor]]:
    """What is read before anything is handed on: of each rank's share, in its order, as much as
    fits. Ranks of other stages of a pipeline read other tensors meanwhile."""
    rounds: list[list[_Tensor]] = []
    load: Counter[tuple[int, int]] = Counter()  # Of a round and a rank.
    last: Counter[int] = Counter()
    for tensor in tensors:
        added: Counter[int] = Counter()
        for rank, part in tensor.readers:
            added[rank] += part.bytes
        number = max((last[rank] for rank in added), default=0)
        taken = ((load[number, rank], more) for rank, more in added.items())
        if any(before and before + more > max_bytes for before, more in taken):
            number += 1
        for rank, more in added.items():
            last[rank] = number
            load[number, rank] += more
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(tensor)
    return rounds


def _read(reader: SafeReader, tensor: _Tensor, rank: int) -> list[tuple[Tensor, Box]]:
    """A rank's share of a tensor. Raises RunError when it is damaged."""
    read = []
    for of, part in tensor.readers:
        if of != rank:
            continue
        values = reader.read_chunk(tensor.name, part.box)
        if tuple(values.shape) != sizes(part.box) or values.dtype != part.dtype:
            raise RunError(
                f"checkpoint {reader.path} is damaged: a part of {tensor.name} is another one"
            )
        read.append((values, part.box))
    return read
