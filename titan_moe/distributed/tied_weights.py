"""Parameters that are one parameter of the model, kept as copies.

An embedding may also be the output layer's weight, or serve multi-token prediction on the last
stage of a pipeline. Its copies are cut alike, start alike and, because their gradients are summed
here before anything looks at them, are updated alike: bit by bit, as the same arithmetic runs on
the same numbers in the same places.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from titan_moe.distributed.dtensor import local_part


class TiedWeights(NamedTuple):
    """The tied weights that this rank takes part in."""

    copies: list[list[nn.Parameter]]
    """The copies on this rank, by tied weight."""
    replicas: set[nn.Parameter]
    """Copies on this rank other than a parameter's first, which some rank counts: norms leave them
    out."""
    partner: int | None
    """The rank of the pipeline, other than this one, that has copies too."""


def find_tied_weights(
    groups: Sequence[Sequence[str]], parameters: Mapping[str, nn.Parameter], ends: tuple[int, int]
) -> TiedWeights:
    """Returns the tied weights among this rank's parameters.

    Args:
        groups: names that are one parameter; copies stand on the first or the last stage.
        parameters: this rank's.
        ends: ranks, by their numbers in the world, of the pipeline's first and last stage.
    """
    copies = [
        [parameters[n] for n in group if n in parameters and parameters[n].requires_grad]
        for group in groups
    ]
    others = [end for end in ends if end != dist.get_rank()]
    return TiedWeights(
        copies=[tie for tie in copies if tie],
        replicas={parameters[name] for group in groups for name in group[1:] if name in parameters},
        partner=others[0] if len(others) == 1 else None,
    )


def sum_tied_grads(tied: TiedWeights, group: ProcessGroup, device: torch.device) -> None:
    """Give every copy the sum of all copies' gradients, in place; on two ranks at most.

    Two terms are added, here and there, so both ranks get the same bits.
    """
    for copies in tied.copies:
        for copy in copies:
            if copy.grad is None:  # No token came by.
                copy.grad = torch.zeros_like(copy)
        grads = [local_part(copy.grad) for copy in copies]  # type: ignore[arg-type]
        total = torch.stack(grads).sum(0)
        if tied.partner is not None:
            total = total + _exchanged(total.to(device), tied.partner, group).to(total.device)
        for grad in grads:
            grad.copy_(total)


def _exchanged(sent: Tensor, partner: int, group: ProcessGroup) -> Tensor:
    received = torch.empty_like(sent)
    ops = [
        dist.P2POp(dist.isend, sent, partner, group),
        dist.P2POp(dist.irecv, received, partner, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received
