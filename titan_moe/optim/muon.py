"""Muon: momentum made orthogonal, for the matrices inside layers; AdamW for all else.

From Keller Jordan's Muon (kellerjordan.github.io/posts/muon): Nesterov momentum, and the five
Newton-Schulz steps with his coefficients. From Moonlight (arXiv 2502.16982): weight decay as in
AdamW, and updates scaled to AdamW's root mean square, so that both take the same learning rate.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_moe.distributed.dtensor import local_part
from titan_moe.distributed.whole_matrices import Cut, matrix_cuts, on_whole_matrices
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

    def zero_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        if group["name"] != MATRICES:
            return super().zero_state(group, parameter)
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
        made = on_whole_matrices(self._orthogonalized, _stacked(directions, batch), batch.cuts)
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
