"""Muon: momentum made orthogonal, for the matrices inside layers; AdamW for all else.

From Keller Jordan's Muon (kellerjordan.github.io/posts/muon): Nesterov momentum, and the five
Newton-Schulz steps with his coefficients. From Moonlight (arXiv 2502.16982): weight decay as in
AdamW, and updates scaled to AdamW's root mean square, so that both take the same learning rate.

Where ranks hold pieces of matrices, each matrix is put together on one rank, made orthogonal there
and sent back. A batch of N matrices that P ranks have cut is shared out: every rank gets its share
of the N whole and sends the pieces of the others. So no matrix is worked on twice within the ranks
that cut it, and a rank sends and receives each way about the bytes that it holds, where gathering
all of them everywhere would be P - 1 times that. Where several axes cut a matrix (fsdp and tp, edp
and etp), the last cut is undone first, one exchange after the other. Whole replicas (over
dp_replicate, or of what tp leaves whole) each do the same work on the same bits.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from titan_moe.distributed.dtensor import local_part
from titan_moe.optim.adam import Adam

MATRICES = "matrices"
"""The name of the group that Muon updates."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Of a momentum that counts as one; a smaller one makes a smaller update.
_SMALLEST_NORM = 1e-7
# Elements of this rank worked on together: 256 MiB in float32, and a few times that besides.
_TOGETHER = 2**26


def orthogonalized(x_NAB: Tensor, num_steps: int) -> Tensor:
    """Each matrix with its singular values brought near 1, to 0.7 to 1.2: U V^T, nearly; zeros stay
    zeros. In the type it comes in, all matrices in batched products."""
    a, b, c = COEFFICIENTS
    tall = x_NAB.shape[-2] > x_NAB.shape[-1]
    x = x_NAB.mT if tall else x_NAB
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(num_steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


class Muon(Adam):
    """Muon for the group MATRICES, each expert of a stack by itself; AdamW for the other groups.

    State of a matrix: "momentum_buffer", a mean of gradients as `exp_avg` is. Its arithmetic is
    elementwise, on this rank's parts; the matrices are whole only while they are made orthogonal.

    Args:
        momentum: decay of the mean.
        num_steps: of Newton-Schulz.
        rms: root mean square of an update of full rank, in learning rates.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        momentum: float,
        num_steps: int,
        rms: float,
        **adam: Any,
    ) -> None:
        super().__init__(groups, **adam)
        self._momentum, self._rms = momentum, rms
        self._orthogonalized = partial(orthogonalized, num_steps=num_steps)
        self._batches: dict[tuple[int, ...], list[_Batch]] = {}

    def initial_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        if group["name"] != MATRICES:
            return super().initial_state(group, parameter)
        return {"momentum_buffer": self.zeros(parameter)}

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        if group["name"] != MATRICES:
            return super().update(group, parameters)
        key = tuple(map(id, parameters))
        if key not in self._batches:
            self._batches[key] = list(_batches(parameters))
        for batch in self._batches[key]:
            self._update_batch(group, batch)
        return None

    def _update_batch(self, group: dict[str, Any], batch: "_Batch") -> None:
        lr, shape = group["lr"], batch.parameters[0].shape
        directions = self._directions(batch.parameters)
        made = redistribute_matrices(self._orthogonalized, _stacked(directions, batch), batch.cuts)
        sizes = [direction.shape[:-2].numel() for direction in directions]
        own = [local_part(parameter) for parameter in batch.parameters]
        updates = [
            update.view(each.shape).to(each.device)
            for update, each in zip(made.split(sizes), own, strict=True)
        ]
        torch._foreach_mul_(own, 1 - lr * group["weight_decay"])
        # U V^T of rank r has the root mean square sqrt(r / (A B)): 1 / sqrt(max(A, B)) at most.
        torch._foreach_add_(own, updates, alpha=-lr * self._rms * max(shape[-2:]) ** 0.5)

    def _directions(self, parameters: list[Tensor]) -> list[Tensor]:
        """Nesterov's: what the momentum would be after the same gradient once more. In the memory
        of the gradients."""
        grads = [local_part(parameter.grad) for parameter in parameters]  # type: ignore[arg-type]
        kept = self.moments(parameters, "momentum_buffer")
        wide = self.widened(parameters, kept)
        torch._foreach_lerp_(wide, grads, 1 - self._momentum)
        torch._foreach_lerp_(grads, wide, self._momentum)
        self.put_back(kept, wide)
        return grads


class Cut(NamedTuple):
    """How the ranks of one axis share every matrix of a batch."""

    group: ProcessGroup
    dim: int
    """-2 or -1."""
    lengths: tuple[int, ...]
    """Of each rank's piece along `dim`; 0 for ranks that have nothing."""


class _Batch(NamedTuple):
    """Parameters whose matrices are alike, and cut alike."""

    parameters: list[Tensor]
    cuts: list[Cut]


def _batches(parameters: list[Tensor]) -> Iterator[_Batch]:
    """All ranks that share matrices make the same batches in the same order."""
    alike: dict[tuple, list[Tensor]] = {}
    cuts: dict[tuple, list[Cut]] = {}
    for parameter in parameters:
        own = matrix_cuts(parameter)
        signature = tuple((cut.group.group_name, *cut[1:]) for cut in own)
        key = (parameter.dtype, parameter.shape[-2:], signature)
        alike.setdefault(key, []).append(parameter)
        cuts[key] = own
    for key, members in alike.items():
        largest = max(_largest_held(member, cuts[key]) for member in members)
        together = max(1, _TOGETHER // max(1, largest))
        for first in range(0, len(members), together):
            yield _Batch(members[first : first + together], cuts[key])


def _largest_held(parameter: Tensor, cuts: list[Cut]) -> int:
    """Elements that the rank with the largest part holds: every rank's answer is the same."""
    matrices = local_part(parameter).shape[:-2].numel()
    sizes = list(parameter.shape[-2:])
    for cut in cuts:
        sizes[cut.dim] = -(-sizes[cut.dim] // len(cut.lengths))
    return matrices * sizes[0] * sizes[1]


def _stacked(pieces: list[Tensor], batch: _Batch) -> Tensor:
    """[N, A, B] of this rank's pieces, where the ranks can exchange them."""
    flat = [piece if piece.ndim > 2 else piece[None] for piece in pieces]
    x_NAB = flat[0] if len(flat) == 1 else torch.cat(flat)
    first = batch.parameters[0]
    # Parameters kept in the host's memory are worked on where they are computed with.
    return x_NAB.to(first.device_mesh.device_type) if isinstance(first, DTensor) else x_NAB


# --- redistributing matrices ---------------------------------------------------------------------


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


def redistribute_matrices(
    function: Callable[[Tensor], Tensor], pieces_NAB: Tensor, cuts: Sequence[Cut]
) -> Tensor:
    """This rank's pieces of function(whole matrices), which keeps shapes: collective over the cuts'
    groups, in which every rank has as many pieces N, in the same order. Waits for no device."""
    if not cuts:
        return function(pieces_NAB)
    cut, *others = cuts
    share_NAB = _gather_share(pieces_NAB, cut)
    return _scatter(redistribute_matrices(function, share_NAB, others), len(pieces_NAB), cut)


def _gather_share(pieces_NAB: Tensor, cut: Cut) -> Tensor:
    """This rank's share of the matrices, with the cut undone."""
    rank, shares = dist.get_rank(cut.group), _shares(len(pieces_NAB), cut)
    shapes = [_with(pieces_NAB.shape, shares[rank], cut.dim, length) for length in cut.lengths]
    sent = [share * pieces_NAB.shape[1:].numel() for share in shares]
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
