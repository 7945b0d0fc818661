"""Moves tensors from any layout to any other one on the same ranks, by intersection of boxes.

A transfer looks only at the parts of a tensor that each rank holds and wants: meshes and shardings
may differ in everything.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.distributed.boxes import Box, inside
from titan_moe.distributed.dtensor import local_part, local_slices
from titan_moe.distributed.transfer_plan import Bucket, Held, plan_transfer

_BUCKET_BYTES = 2**28
"""The most that a rank sends, and receives, in one all-to-all of several tensors."""
LocalPart = tuple[Tensor, Box]
"""A rank's part of a tensor, and its slices of the whole."""


def move(sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> int:
    """Fill `targets` from `sources` of the same names, on any ranks, and free the memory of
    `sources`, even if there are other references; collective.

    Both are DTensors of any mesh of the world, or plain tensors, which are whole. Returns the bytes
    that all ranks together have sent. Raises ValueError on all ranks alike, as plan_transfer does.
    """
    mine = [
        {name: Held(tuple(x.shape), x.dtype, local_slices(x)) for name, x in tensors.items()}
        for tensors in (sources, targets)
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    plan = plan_transfer(*zip(*everyone, strict=True), max_bytes=_BUCKET_BYTES)
    held, wanted = (
        {name: (local_part(x).detach(), told[name].box) for name, x in tensors.items()}
        for tensors, told in zip((sources, targets), mine, strict=True)
    )
    sent = execute(plan, held, wanted)
    for tensor, _ in held.values():
        tensor.untyped_storage().resize_(0)
    return sent


@torch.no_grad()
def execute(
    plan: Sequence[Bucket],
    sources: Mapping[str, LocalPart],
    targets: Mapping[str, LocalPart],
) -> int:
    """Carry out a plan of the world's ranks; collective. Returns the bytes that all of them send.

    Args:
        sources, targets: this rank's parts and where they lie, as the plan was told; no target
            shares memory with a source.
    """
    rank, ranks, sent = dist.get_rank(), range(dist.get_world_size()), 0
    for bucket in plan:
        outgoing: list[list[Tensor]] = [[] for _ in ranks]
        incoming: list[list[Tensor]] = [[] for _ in ranks]
        for pieces in bucket:
            for source, target, box in pieces.of(rank):
                if source == target:
                    _part(targets[pieces.name], box).copy_(_part(sources[pieces.name], box))
                elif source == rank:
                    outgoing[target].append(_part(sources[pieces.name], box))
                else:
                    incoming[source].append(_part(targets[pieces.name], box))
        if moved := sum(int(pieces.bytes_sent.sum()) for pieces in bucket):
            _exchange(outgoing, incoming)
            sent += moved
    return sent


def _part(part: LocalPart, box: Box) -> Tensor:
    """Returns a view of the elements in a box."""
    tensor, whole = part
    return tensor[inside(box, whole)]


def _exchange(outgoing: list[list[Tensor]], incoming: list[list[Tensor]]) -> None:
    """Makes one all-to-all of bytes, by rank."""
    device = torch.device("cuda" if "nccl" in dist.get_backend_config() else "cpu")
    numbers = [[sum(each.nbytes for each in of) for of in way] for way in (outgoing, incoming)]
    sent, received = (torch.empty(sum(each), dtype=torch.uint8, device=device) for each in numbers)
    for piece, space in _places(outgoing, sent):
        space.copy_(piece.contiguous().view(-1).view(torch.uint8))
    dist.all_to_all_single(received, sent, numbers[1], numbers[0])
    for piece, space in _places(incoming, received):
        if space.storage_offset() % piece.element_size():  # view() needs an aligned offset.
            space = space.clone()
        piece.copy_(space.view(piece.dtype).view(piece.shape))


def _places(pieces: list[list[Tensor]], buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each piece with its part of the common byte buffer."""
    first = 0
    for piece in chain.from_iterable(pieces):
        yield piece, buffer[first : first + piece.nbytes]
        first += piece.nbytes
