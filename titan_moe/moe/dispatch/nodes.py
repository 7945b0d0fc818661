"""The ranks of an ep group by the node that they are on, and what travels by way of them."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class Nodes(NamedTuple):
    """A nodes of G ranks each."""

    across: ProcessGroup
    """The ranks that stand on their nodes where this one stands on its own, node after node."""
    within: ProcessGroup
    """The ranks of this node."""

    def by_node(self, x_TP: Tensor) -> Tensor:
        """[T, P] -> [T, A, G]."""
        return x_TP.unflatten(1, (-1, self.within.size()))

    def told(self, reached_TP: Tensor, most: int) -> Tensor:
        """For the ranks that stand where this one stands, [P, I + G]: of this rank's tokens that go
        to their node, how many go to more than 0, 1, ..., I - 1 ranks there, and how many to each;
        zeros for the other ranks.

        Args:
            reached_TP: whether a token goes to a rank.
            most: I, ranks of a node that a token can go to.
        """
        reached_TAG = self.by_node(reached_TP)
        above_I = torch.arange(most, device=reached_TP.device)
        sizes_AI = (reached_TAG.sum(2)[..., None] > above_I).sum(0)
        size = self.within.size()
        told_AG = sizes_AI.new_zeros(len(sizes_AI), size, most + size)
        told_AG[:, self.within.rank()] = torch.cat([sizes_AI, reached_TAG.sum(0)], 1)
        return told_AG.flatten(0, 1)

    def heard(self, heard_P: Tensor, rows_P: Tensor) -> list[Tensor]:
        """Rows that come from each node [A]; of these, how many go on to more than 0, 1, ... ranks
        here [I], and how many to each rank here [G]; rows that come here by way of each rank [G].

        Args:
            heard_P: what all ranks have `told`.
            rows_P: rows of each rank that are for this one.
        """
        size = self.within.size()
        heard_A = heard_P.unflatten(0, (-1, size))[:, self.within.rank()]
        sizes_AI, onward_AG = heard_A[:, :-size], heard_A[:, -size:]
        through_G = rows_P.unflatten(0, (-1, size)).sum(0)
        return [sizes_AI[:, 0], sizes_AI.sum(0), onward_AG.sum(0), through_G]
