"""Whole matrices where ranks hold pieces of them: each is put together on one rank, worked on there
and sent back.

A batch of N matrices that P ranks have cut is shared out: every rank gets its share of the N whole
and sends the pieces of the others. So no matrix is worked on twice within the ranks that cut it,
and a rank sends and receives each way about the bytes that it holds, where gathering all of them
everywhere would be P - 1 times that. Where several axes cut a matrix (fsdp and tp, edp and etp),
the last cut is undone first, one exchange after the other. Whole replicas (over dp_replicate, or of
what tp leaves whole) each do the same work on the same bits.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from titan_moe.distributed.dtensor import local_part


class Cut(NamedTuple):
    """How the ranks of one axis share every matrix of a batch."""

    group: ProcessGroup
    dim: int
    """-2 or -1."""
    lengths: tuple[int, ...]
    """Of each rank's piece along `dim`; 0 for ranks that have nothing."""


def matrix_cuts(parameter: Tensor) -> list[Cut]:
    """The cuts through a parameter's matrices, its last two dims, the last made first.

    A dim before them (a stack's experts) may be cut without going through a matrix. Axes of a mesh
    cut from the last to the first: tp, ep and etp before fully_shard's axis, which cuts what they
    have left.
    """
    if not isinstance(parameter, DTensor):
        return []
    mesh, cuts, left = parameter.device_mesh, [], list(parameter.shape)
    for axis in reversed(range(mesh.ndim)):
        placement, size = parameter.placements[axis], mesh.size(axis)
        if placement.is_replicate() or size == 1:
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]
        lengths = chunk_lengths(left[dim], size)
        left[dim] = lengths[mesh.get_local_rank(axis)]
        if dim >= parameter.ndim - 2:
            cuts.append(Cut(mesh.get_group(axis), dim - parameter.ndim, lengths))
    held = local_part(parameter).shape
    assert tuple(left) == tuple(held), f"{tuple(held)} of {tuple(parameter.shape)}, not {left}"
    return cuts[::-1]


def chunk_lengths(length: int, num_chunks: int) -> tuple[int, ...]:
    """As torch.chunk and fully_shard cut: all alike, the last ones shorter or empty."""
    each = -(-length // num_chunks)
    return tuple(max(0, min(each, length - chunk * each)) for chunk in range(num_chunks))


def on_whole_matrices(
    function: Callable[[Tensor], Tensor], pieces_NAB: Tensor, cuts: Sequence[Cut]
) -> Tensor:
    """This rank's pieces of function(whole matrices), which keeps shapes: collective over the cuts'
    groups, in which every rank has as many pieces N, in the same order. Waits for no device."""
    if not cuts:
        return function(pieces_NAB)
    cut, *others = cuts
    share_NAB = _gather_share(pieces_NAB, cut)
    return _scatter(on_whole_matrices(function, share_NAB, others), len(pieces_NAB), cut)


def _gather_share(pieces_NAB: Tensor, cut: Cut) -> Tensor:
    """This rank's share of the matrices, with the cut undone."""
    rank, shares = dist.get_rank(cut.group), _shares(len(pieces_NAB), cut)
    shapes = [_with(pieces_NAB.shape, shares[rank], cut.dim, length) for length in cut.lengths]
    sent = [share * pieces_NAB[0].numel() for share in shares]
    received = _exchange(pieces_NAB, sent, [shape.numel() for shape in shapes], cut.group)
    parts = received.split([shape.numel() for shape in shapes])
    return torch.cat([p.view(s) for p, s in zip(parts, shapes, strict=True)], cut.dim)


def _scatter(share_NAB: Tensor, num_pieces: int, cut: Cut) -> Tensor:
    """The reverse: this rank's pieces of all matrices."""
    rank, shares = dist.get_rank(cut.group), _shares(num_pieces, cut)
    parts = share_NAB.split(list(cut.lengths), cut.dim)
    shape = _with(share_NAB.shape, num_pieces, cut.dim, cut.lengths[rank])
    received = [share * shape[1:].numel() for share in shares]
    flat = torch.cat([part.reshape(-1) for part in parts])
    return _exchange(flat, [p.numel() for p in parts], received, cut.group).view(shape)


def _exchange(
    sent: Tensor, sent_sizes: list[int], received_sizes: list[int], group: ProcessGroup
) -> Tensor:
    received = sent.new_empty(sum(received_sizes))
    dist.all_to_all_single(
        received, sent.reshape(-1).contiguous(), received_sizes, sent_sizes, group=group
    )
    return received


def _shares(number: int, cut: Cut) -> list[int]:
    size = len(cut.lengths)
    return [number // size + (rank < number % size) for rank in range(size)]


def _with(shape: torch.Size, number: int, dim: int, length: int) -> torch.Size:
    sizes = [number, *shape[1:]]
    sizes[dim] = length
    return torch.Size(sizes)
