"""The global gradient norm, the same number in every layout, and clipping by it.

Gradients arrive as plain sums over tokens; one pass divides them by the number of target tokens and
clips. The sums over ranks are complete before:

    | a parameter that is     | is summed over           | by                          |
    |-------------------------|--------------------------|-----------------------------|
    | dense                   | dp_replicate and fsdp    | FSDP                        |
    | a routed expert's       | dp_replicate and edp     | FSDP                        |
    |                         | ep and etp               | the dispatch's own backward |
    | whole on every tp rank  | tp                       | tensor_parallel.sum_grads   |
    | an adapter's, whole on  | etp                      | tensor_parallel.sum_grads   |
    | every etp rank          |                          |                             |
    | a copy of a tied weight | the stages with a copy   | tied_weights.sum_tied_grads |
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor, nn

from titan_moe.distributed.dtensor import local_part, local_slices, sharding_of


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
    # Gradients by their number of copies: as a tensor, these numbers would have to be copied to
    # the device, which the host waits for.
    by_copies: dict[int, list[Tensor]] = {}
    for parameter, grad in zip(parameters, local_grads(parameters), strict=True):
        copies = ranks_per_stage // _num_pieces(parameter)
        by_copies.setdefault(copies, []).append(grad)
    if not by_copies:
        return torch.zeros((), dtype=torch.float64)
    squares = [_squares(grads).sum() / copies for copies, grads in by_copies.items()]
    return torch.stack(squares).sum()


def _squares(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """The squared norm of each tensor, in float64.

    On a CPU sums of float32 lose a part of a thousand from ten million elements on, another one in
    every layout. There a copy of one tensor after the other is widened; CUDA adds wide.
    """
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64)).square()


class ParameterNorms:
    """The norm of every parameter's gradient, each expert's apart, over all ranks.

    Args:
        names: every parameter of the whole model, on whichever rank.
        num_experts: entries of each stack of experts.
    """

    def __init__(self, names: Sequence[str], num_experts: int) -> None:
        lengths = [num_experts if ".experts." in name else 1 for name in names]
        ends = list(accumulate(lengths))
        self._places = {
            name: slice(end - length, end)
            for name, end, length in zip(names, ends, lengths, strict=True)
        }
        self._size = ends[-1]

    def squares(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        ranks_per_stage: int,
        device: torch.device,
    ) -> Tensor:
        """This rank's share of all squares: a float64 vector to be summed over the world. Does not
        wait for the device."""
        found = torch.zeros(self._size, dtype=torch.float64, device=device)
        for name, parameter in parameters:
            if parameter.grad is None or name not in self._places:
                continue  # One copy of a parameter counts.
            grad = local_part(parameter.grad)
            if ".experts." in name:
                own, tensors = local_slices(parameter)[0], grad.unbind(0)
            else:
                own, tensors = slice(0, 1), (grad,)
            copies = ranks_per_stage // _num_pieces(parameter)
            if tensors:
                found[self._places[name]][own] = _squares(tensors).to(device) / copies
        return found

    def by_name(self, squares: Tensor, divisor: float) -> dict[str, list[float]]:
        """Returns norms by name, from squares summed over the world. A parameter has one norm, a
        stack has one for each expert."""
        norms = (squares.sqrt() / divisor).tolist()
        return {name: norms[place] for name, place in self._places.items()}


def scale_grads(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient in place."""
    grads = local_grads(parameters)
    if grads:
        torch._foreach_mul_(grads, factor)


def clip_factor(norm: float, max_norm: float) -> float:
    """Returns the factor that brings a norm down to max_norm; 1 for a smaller norm."""
    return min(1.0, max_norm / norm) if norm > 0 else 1.0


def _num_pieces(parameter: Tensor) -> int:
    sharding, axes = sharding_of(parameter)
    return prod(axes[axis] for cut in sharding.cuts for axis in cut)
