"""Workloads: choices of experts with known counts, in place of a router's (`debug.router_load`).

They follow from the workload, `debug.seed`, the step and a rank's place in its ep group alone:

    W0  every expert gets as many rows
    W1  top_k experts anywhere get half of all rows
    W2  the experts of one rank get half of them
    W3  one expert of each rank gets half of its rank's
    W4  the first half of the sources routes as W2 does, the other evenly
    W5  one rank gets no row
    W6  as W2, but the next rank in each step
    W7  as W2 in every fourth step, evenly in the others

An expert gets at most one row of a token; what would exceed that goes to the other experts. A
token's experts are spread like those of a random router: 5.2 of 8 ranks have one of its 8 of 128.
"""

import random
from typing import NamedTuple

import torch
from torch import Tensor, nn

WORKLOADS = tuple(f"W{n}" for n in range(8))
_BURST = 4
"""Steps from one burst of W7 to the next."""


class Place(NamedTuple):
    """The source of some tokens, and the model that routes them."""

    source: int
    """Place of the rank among those that hold the experts."""
    ranks: int
    num_experts: int
    top_k: int
    seed: int = 0


def rows_of_experts(workload: str, step: int, place: Place, num_tokens: int) -> list[int]:
    """Returns the rows of each expert that a source's tokens have in a step."""
    num_experts, num_local = place.num_experts, place.num_experts // place.ranks
    total, draw = num_tokens * place.top_k, random.Random(place.seed)
    is_late = 2 * place.source >= place.ranks
    if (workload == "W7" and step % _BURST) or (workload == "W4" and is_late):
        workload = "W0"
    chosen = (draw.randrange(place.ranks) + step * (workload == "W6")) % place.ranks
    of_rank = range(chosen * num_local, (chosen + 1) * num_local)
    first: set[int] = set(of_rank)
    wanted = total // 2
    if workload in ("W0", "W5"):
        first = set(range(num_experts)) - (first if workload == "W5" else set())
        wanted = total
    elif workload == "W1":
        first = set(draw.sample(range(num_experts), place.top_k))
    elif workload == "W3":
        first = set(range(0, num_experts, num_local))
    others = [expert for expert in range(num_experts) if expert not in first]
    wanted = min(wanted, len(first) * num_tokens)
    wanted = max(wanted, total - len(others) * num_tokens)
    rows = [0] * num_experts
    for experts, part in ((sorted(first), wanted), (others, total - wanted)):
        each, left = divmod(part, max(len(experts), 1))
        for number, expert in enumerate(experts):
            # Sources take turns with the rows that do not divide.
            rows[expert] = each + ((number - place.source * left) % len(experts) < left)
    return rows


class RouterLoad(nn.Module):
    """Takes the place of a router's `select`."""

    step = 0

    def __init__(self, workload: str, place: Place, layer: int) -> None:
        super().__init__()
        self._workload, self._place = workload, place
        order = list(range(place.num_experts))
        random.Random(f"{place.seed} {layer}").shuffle(order)
        self._order = order

    def forward(self, scores_TE: Tensor, *_: object) -> Tensor:
        """Returns experts_TK. Slots lie expert by expert; a token takes one in every T, and never
        two of the same expert, which has at most T."""
        num_tokens = len(scores_TE)
        rows = rows_of_experts(self._workload, self.step, self._place, num_tokens)
        experts_E, rows_E = torch.tensor([self._order, [rows[n] for n in self._order]])
        slots = experts_E.repeat_interleave(rows_E)
        return slots.view(-1, num_tokens).t().contiguous().to(scores_TE.device)

    def extra_repr(self) -> str:
        return self._workload
