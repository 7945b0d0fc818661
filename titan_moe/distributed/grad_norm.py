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

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import prod

import torch
from torch import Tensor, nn

from titan_moe.distributed.dtensor import local_part, local_slices, sharding_of


def local_grads(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's pieces of all gradients; parameters without one are left out."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [local_part(grad) for grad in grads]


def sum_of_squares(
    parameters: Iterable[nn.Parameter],
    ranks_per_stage: int,
    shares: dict[nn.Parameter, Tensor] | None = None,
) -> Tensor:
    """This rank's share of the squared 2-norm: a float64 scalar to be summed over the world.

    A piece that several of the pipeline stage's `ranks_per_stage` ranks hold counts once in that
    sum, because each of them adds its square divided by their number.

    Args:
        shares: is given each parameter's part of the result, [].
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    # Gradients by their number of copies: as a tensor, these numbers would have to be copied to
    # the device, which the host waits for.
    by_copies: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters:
        copies = ranks_per_stage // _num_pieces(parameter)
        by_copies.setdefault(copies, []).append(parameter)
    if not by_copies:
        return torch.zeros((), dtype=torch.float64)
    squares = []
    for copies, own in by_copies.items():
        each = _squares(local_grads(own))
        squares.append(each.sum() / copies)
        if shares is not None:
            shares.update(zip(own, (each / copies).unbind(), strict=True))
    return torch.stack(squares).sum()


def _squares(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """The squared norm of each tensor, in float64.

    On a CPU sums of float32 lose a part of a thousand from ten million elements on, another one in
    every layout. There a copy of one tensor after the other is widened; CUDA adds wide.
    """
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64)).square()


def _squares_of_entries(stack: Tensor) -> Tensor:
    """The squared norm of each entry of a stack, in float64. Rows alone are added up in float32:
    they are short, and this is several times as fast on a CPU."""
    if not len(stack):
        return stack.new_zeros(0, dtype=torch.float64)
    wide = torch.promote_types(stack.dtype, torch.float32)
    norms = torch.linalg.vector_norm(stack, dim=-1, dtype=wide)
    return norms.double().square().reshape(len(stack), -1).sum(1)


class ParameterNorms:
    """The norm of every parameter's gradient, each expert's apart, over all ranks.

    Args:
        names: every parameter of the whole model, on whichever rank.
        num_experts: entries of each stack of experts.
    """

    def __init__(self, names: Sequence[str], num_experts: int) -> None:
        self._lengths = {name: num_experts if ".experts." in name else 1 for name in names}

    def squares(
        self,
        parameters: Mapping[str, nn.Parameter],
        shares: Mapping[nn.Parameter, Tensor],
        ranks_per_stage: int,
        device: torch.device,
    ) -> Tensor:
        """This rank's share of all squares: a float64 vector to be summed over the world. Does not
        wait for the device.

        Args:
            shares: those of whole parameters, by `sum_of_squares`.
        """
        found = torch.zeros(sum(self._lengths.values()), dtype=torch.float64, device=device)
        places = dict(zip(self._lengths, found.split(list(self._lengths.values())), strict=True))
        to, whole = [], []
        for name, parameter in parameters.items():
            if parameter.grad is None:
                continue
            if ".experts." in name:
                own_E = places[name][local_slices(parameter)[0]]
                copies = ranks_per_stage // _num_pieces(parameter)
                own_E.copy_(_squares_of_entries(local_part(parameter.grad)) / copies)
            else:
                to.append(places[name][0])
                whole.append(shares[parameter])
        if whole:
            torch._foreach_copy_(to, whole)
        return found

    def by_name(self, squares: Tensor, divisor: float) -> dict[str, list[float]]:
        """Returns norms by name, from squares summed over the world. A parameter has one norm, a
        stack has one for each expert."""
        norms = iter((squares.sqrt() / divisor).tolist())
        return {name: list(islice(norms, length)) for name, length in self._lengths.items()}


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
