"""The global gradient norm, the same number in every layout, and clipping by it.

Gradients arrive as plain sums over tokens; one pass divides them by the number of target tokens and
clips.
"""

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_moe.distributed.local import local_part


def local_grads(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's pieces of all gradients; parameters without one are left out."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [local_part(grad) for grad in grads]


def sum_of_squares(parameters: Iterable[nn.Parameter], ranks_per_stage: int) -> Tensor:
    """This rank's share of the squared 2-norm: a float64 scalar to be summed over the world.

    A piece that several of the pipeline stage's `ranks_per_stage` ranks hold counts once in that
    sum, because each of them adds its square divided by their number.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    grads = local_grads(parameters)
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    copies = [ranks_per_stage // _num_pieces(parameter) for parameter in parameters]
    # bfloat16 gradients would round each piece's norm, differently in every layout.
    dtype = torch.promote_types(grads[0].dtype, torch.float32)
    squares = torch.stack(torch._foreach_norm(grads, 2, dtype=dtype)).double().square()
    return (squares / torch.tensor(copies, device=squares.device)).sum()


def max_abs(parameters: Iterable[nn.Parameter]) -> Tensor:
    """This rank's share of the inf-norm: a float64 scalar whose maximum is taken over the world."""
    grads = [grad for grad in local_grads(parameters) if grad.numel()]
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(torch._foreach_norm(grads, float("inf"))).double().max()


def scale_grads(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient in place."""
    grads = local_grads(parameters)
    if grads:
        torch._foreach_mul_(grads, factor)


def clip_factor(norm: float, max_norm: float) -> float:
    """What brings a norm down to max_norm; 1 for a smaller norm."""
    return min(1.0, max_norm / norm) if norm > 0 else 1.0


def _num_pieces(parameter: Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return prod(size for placement, size in sizes if not placement.is_replicate())
