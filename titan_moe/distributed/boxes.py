"""Parts of a tensor that are boxes: their arithmetic, and their exchange between ranks."""

from collections.abc import Sequence
from math import prod

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.comm.collectives import gather_parts

Box = tuple[slice, ...]
"""Begin and end of a part along each dim of the whole tensor."""


def sizes(box: Box) -> tuple[int, ...]:
    """Returns the shape of a box."""
    return tuple(each.stop - each.start for each in box)


def overlap(one: Box, other: Box) -> Box:
    """Returns the intersection of two boxes; it has length 0 along a dim where they do not meet."""
    starts = [max(a.start, b.start) for a, b in zip(one, other, strict=True)]
    stops = [min(a.stop, b.stop) for a, b in zip(one, other, strict=True)]
    return tuple(slice(a, max(a, b)) for a, b in zip(starts, stops, strict=True))


def inside(box: Box, whole: Box) -> Box:
    """Returns the same place, relative to the corner of a box that holds it."""
    if not prod(sizes(box)):  # It lies anywhere.
        return tuple(slice(0, size) for size in sizes(box))
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, whole, strict=True)
    )


def exchange_boxes(
    local: Tensor,
    before: Sequence[Box],
    after: Sequence[Box],
    *,
    place: int,
    group: ProcessGroup,
) -> Tensor:
    """Exchanges boxes of a tensor; returns this rank's part afterwards. Collective over the group.

    Takes one all-to-all, or one all-gather if all ranks want the same box and its pieces have one
    size.

    Args:
        local: this rank's part before.
        before, after: the boxes of the group's ranks, in its order; of those before, no two hold
            the same element.
        place: this rank's number in the group.
    """
    mine, wanted = before[place], after[place]
    sent = [overlap(mine, box) for box in after]
    received = [overlap(box, wanted) for box in before]
    numbers = [prod(sizes(box)) for box in received]
    if all(box == wanted for box in after) and len(set(numbers)) == 1:
        pieces: Sequence[Tensor] = gather_parts(local.reshape(-1), group).unbind()
    else:
        given = [prod(sizes(box)) for box in sent]
        parts = _joined(local, [inside(box, mine) for box in sent], given)
        buffer = local.new_empty(sum(numbers))
        dist.all_to_all_single(buffer, parts, numbers, given, group=group)
        del parts
        pieces = buffer.split(numbers)
    whole = local.new_empty(sizes(wanted))
    for piece, box in zip(pieces, received, strict=True):
        if piece.numel():
            whole[inside(box, wanted)] = piece.view(sizes(box))
    return whole


def _joined(local: Tensor, boxes: Sequence[Box], numbers: list[int]) -> Tensor:
    """Returns the elements of boxes in one buffer, and holds no other copy of them on the way."""
    buffer = local.new_empty(sum(numbers))
    for piece, box in zip(buffer.split(numbers), boxes, strict=True):
        if piece.numel():
            piece.view(sizes(box)).copy_(local[box])
    return buffer
