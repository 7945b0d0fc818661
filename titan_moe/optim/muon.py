"""Muon: momentum made orthogonal, for the matrices inside layers; AdamW for all else.

From Keller Jordan's Muon (kellerjordan.github.io/posts/muon): Nesterov momentum, and the five
Newton-Schulz steps with his coefficients. From Moonlight (arXiv 2502.16982): weight decay as in
AdamW, and updates scaled to AdamW's root mean square, so that both take the same learning rate.

Where ranks hold pieces of matrices, each matrix is put together on one rank, made orthogonal there
and sent back. A batch of N matrices that P ranks have cut is shared out: every rank gets its share
of the N whole and sends the pieces of the others. So no matrix is worked on twice within the ranks
that cut it, and a rank sends and receives each way (P - 1) / P of the bytes that it holds, where
gathering all of them everywhere would be P - 1 times them. Where several axes cut a matrix (fsdp
and tp, edp and etp), P counts the ranks of all of them, and the exchange is one over their joined
group. Whole replicas (over dp_replicate, or of what tp leaves whole) each do the same work on the
same bits.

In bfloat16, as its author runs them on GPUs, the steps take products of twice the rate or more, and
matrices travel in half the bytes. Rounding moves singular values by some thousandths, where the
steps leave them anywhere from 0.68 to 1.17.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from titan_moe.config.job_config import Optimizer
from titan_moe.distributed.boxes import Box, exchange_boxes, sizes
from titan_moe.distributed.dtensor import local_part, mesh_rank, sharding_of
from titan_moe.distributed.parallel_dims import group_of
from titan_moe.optim.adam import Adam

MATRICES = "matrices"
"""The kind of the groups that Muon updates."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# A momentum with a smaller norm makes a smaller update.
_SMALLEST_NORM = 1e-7
# Elements of this rank worked on together: 256 MiB in float32, and a few times that besides.
_TOGETHER = 2**26

JoinedGroup = Callable[[tuple[str, ...]], ProcessGroup]
"""The ranks that differ from this one along these axes only, ascending: `Meshes.group`."""


def orthogonalized(x_NAB: Tensor, num_steps: int) -> Tensor:
    """Returns matrices close to U V^T of each one's singular value decomposition: singular values
    come to lie between 0.7 and 1.2, and zeros stay zeros. Keeps the type; products are batched."""
    a, b, c = COEFFICIENTS
    tall = x_NAB.shape[-2] > x_NAB.shape[-1]
    x = x_NAB.mT if tall else x_NAB
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(num_steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(Adam):
    """Muon for groups of the kind MATRICES, each expert of a stack by itself; AdamW for others.

    State of a matrix: "momentum_buffer", a mean of gradients as `exp_avg` is. Its arithmetic is
    elementwise, on this rank's parts; the matrices are whole only while they are made orthogonal.

    Args:
        joined_group: asked at the first update, for axes that cut the same matrices; may be left
            out where no two axes do.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        config: Optimizer,
        joined_group: JoinedGroup | None = None,
    ) -> None:
        super().__init__(groups, config)
        self._momentum, self._rms = config.muon_momentum, config.muon_rms
        self._orthogonalized = partial(orthogonalized, num_steps=config.muon_steps)
        self._dtype, self._joined_group = config.muon_dtype, joined_group
        self._batches: dict[tuple[int, ...], list[_Batch]] = {}

    def initial_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        if group["kind"] != MATRICES:
            return super().initial_state(group, parameter)
        return {"momentum_buffer": self.zeros(parameter)}

    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        if group["kind"] != MATRICES:
            return super().update(group, parameters)
        key = tuple(map(id, parameters))
        if key not in self._batches:
            self._batches[key] = list(_batches(parameters, self._joined_group))
        for batch in self._batches[key]:
            self._update_batch(group, batch)
        return None

    def _update_batch(self, group: dict[str, Any], batch: "_Batch") -> None:
        lr, shape = group["lr"], batch.parameters[0].shape
        directions = self._directions(batch.parameters)
        pieces = narrowed(_stacked(directions, batch), self._dtype)
        made = redistribute_matrices(self._orthogonalized, pieces, batch.cut)
        numbers = [direction.shape[:-2].numel() for direction in directions]
        own = [local_part(parameter) for parameter in batch.parameters]
        updates = [
            update.view(each.shape).to(each)
            for update, each in zip(made.split(numbers), own, strict=True)
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


def narrowed(x_NAB: Tensor, dtype: str) -> Tensor:
    """Converts matrices to the type that Muon's `dtype` names."""
    on_gpu = x_NAB.is_cuda and x_NAB.dtype == torch.float32
    return x_NAB.bfloat16() if dtype == "bfloat16" or (dtype == "auto" and on_gpu) else x_NAB


class Cut(NamedTuple):
    """Describes how ranks share every matrix of a batch."""

    group: ProcessGroup
    place: int
    """This rank's number in the group."""
    boxes: list[Box]
    """Regions of a matrix that the group's ranks hold, one per rank, which may be empty."""


class _Batch(NamedTuple):
    """Parameters whose matrices are alike, and cut alike."""

    parameters: list[Tensor]
    cut: Cut | None


def _batches(parameters: list[Tensor], joined_group: JoinedGroup | None) -> Iterator[_Batch]:
    """Yields batches of like matrices; ranks that share matrices make the same ones in one
    order."""
    alike: dict[tuple, list[Tensor]] = {}
    cuts: dict[tuple, Cut | None] = {}
    for parameter in parameters:
        cut = matrix_cut(parameter, joined_group)
        signature = cut and (cut.group.group_name, str(cut.boxes))
        key = (parameter.dtype, parameter.shape[-2:], signature)
        alike.setdefault(key, []).append(parameter)
        cuts[key] = cut
    for key, members in alike.items():
        largest = max(_largest_held(member, cuts[key]) for member in members)
        together = max(1, _TOGETHER // max(1, largest))
        for first in range(0, len(members), together):
            yield _Batch(members[first : first + together], cuts[key])


def _largest_held(parameter: Tensor, cut: Cut | None) -> int:
    """Elements that the rank with the largest part holds: every rank's answer is the same."""
    matrices = local_part(parameter).shape[:-2].numel()
    pieces = [sizes(box) for box in cut.boxes] if cut else [tuple(parameter.shape[-2:])]
    return matrices * max(rows * columns for rows, columns in pieces)


def _stacked(pieces: list[Tensor], batch: _Batch) -> Tensor:
    """[N, A, B] of this rank's pieces, where the ranks can exchange them."""
    flat = [piece if piece.ndim > 2 else piece[None] for piece in pieces]
    x_NAB = flat[0] if len(flat) == 1 else torch.cat(flat)
    first = batch.parameters[0]
    # Parameters kept in the host's memory are worked on where they are computed with.
    return x_NAB.to(first.device_mesh.device_type) if isinstance(first, DTensor) else x_NAB


# --- redistributing matrices ---------------------------------------------------------------------


def matrix_cut(parameter: Tensor, joined_group: JoinedGroup | None = None) -> Cut | None:
    """Returns which rank holds which piece of a parameter's matrices, its last two dims; None where
    each matrix is whole on one rank.

    A dim before them (a stack's experts) may be cut without going through a matrix.

    Raises:
        ValueError: several axes cut the matrices, and there is no `joined_group`.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh, (sharding, degrees) = parameter.device_mesh, sharding_of(parameter)
    through = {axis for cut in sharding.cuts[parameter.ndim - 2 :] for axis in cut}
    axes = tuple(axis for axis, size in degrees.items() if axis in through and size > 1)
    if not axes:
        return None
    if len(axes) == 1:
        group = mesh.get_group(list(degrees).index(axes[0]))
    elif joined_group is None:
        raise ValueError(f"{' and '.join(axes)} cut the same matrices: Muon needs a joined_group")
    else:
        group = joined_group(axes)
    own = mesh_rank(mesh)
    members = group_of(own, axes, degrees)
    boxes = [sharding.box(member, parameter.shape, degrees)[-2:] for member in members]
    return Cut(group, members.index(own), boxes)


def redistribute_matrices(
    function: Callable[[Tensor], Tensor], pieces_NAB: Tensor, cut: Cut | None
) -> Tensor:
    """This rank's pieces of function(whole matrices), which keeps shapes: collective over the cut's
    group, in which every rank has as many pieces N, in the same order. Waits for no device."""
    if cut is None:
        return function(pieces_NAB)
    number = len(pieces_NAB)
    matrix = tuple(slice(0, max(box[dim].stop for box in cut.boxes)) for dim in range(2))
    pieces = [(slice(0, number), *box) for box in cut.boxes]
    size, more = divmod(number, len(cut.boxes))  # As evenly as possible.
    edges = accumulate((size + (rank < more) for rank in range(len(cut.boxes))), initial=0)
    shares = [(slice(*edge), *matrix) for edge in pairwise(edges)]
    exchange = partial(exchange_boxes, place=cut.place, group=cut.group)
    whole_NAB = exchange(pieces_NAB, pieces, shares)
    return exchange(function(whole_NAB), shares, pieces)
