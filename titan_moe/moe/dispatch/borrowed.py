"""The weights of experts that a rank borrows from another one."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from titan_moe.comm.collectives import AllToAll, never_kept
from titan_moe.ops.linear import linear
from titan_moe.ops.move_rows import add_rows, copy_rows


class Borrowed:
    """An exchange of the weights of lent experts. No tuple: FSDP would look for tensors in it.

    Args:
        lent_PE: bool, this rank's experts that each rank borrows.
        exchange: takes them there.
        experts_E: numbers of this rank's experts, and of those that it borrows.
    """

    def __init__(self, lent_PE: Tensor, exchange: AllToAll, experts_E: Tensor) -> None:
        self.exchange, self.num_local, self.experts_E = exchange, lent_PE.shape[1], experts_E
        # The host knows all sizes: it waits for nothing.
        rank_M, expert_M = lent_PE.nonzero_static(size=sum(exchange.sent)).t()
        self._source_M = expert_M.contiguous()
        copy_M = lent_PE.cumsum(0)[rank_M, expert_M]
        most = sum(number > 0 for number in exchange.sent)
        own_E = torch.arange(self.num_local, device=lent_PE.device)
        rows_EK = own_E.new_full((self.num_local, 1 + most), -1)
        rows_EK[:, 0] = own_E
        first_home = self.num_local + sum(exchange.received)
        home_M = first_home + torch.arange(len(expert_M), device=lent_PE.device)
        self._rows_EK = rows_EK.index_put((expert_M, copy_M), home_M)

    def start(self, weights: Mapping[str, Tensor]) -> None:
        """Starts the exchange of weights of this rank's experts, by name."""
        lent = {
            name: copy_rows(w.detach().flatten(1), self._source_M) for name, w in weights.items()
        }
        with never_kept():  # Kept from the forward, they would be as large as experts.
            self._coming = {name: self.exchange.start(rows) for name, rows in lent.items()}

    def join(self, name: str, w: Tensor) -> Tensor:
        """Returns weights of this rank's experts, and behind them those of borrowed ones. Backward:
        the gradients of an expert's copies come home and are added up, in float32 or wider."""
        return linear(w, partial(self._join, name), self._add_up, self._rows_EK)

    def _join(self, name: str, w: Tensor) -> Tensor:
        with never_kept():
            borrowed = self.exchange.wait(self._coming.pop(name))
        return torch.cat([w, borrowed.view(-1, *w.shape[1:])])

    def _add_up(self, grad: Tensor, rows_EK: Tensor) -> Tensor:
        back, rows = self.exchange.reverse(), grad.flatten(1)
        home = back.wait(back.start(rows[self.num_local :]))
        return add_rows(torch.cat([rows, home]), rows_EK).view(-1, *grad.shape[1:])
