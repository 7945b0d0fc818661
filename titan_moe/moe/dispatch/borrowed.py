"""The weights of experts that a rank borrows from another one."""

import torch
from torch import Tensor

from titan_moe.comm.collectives import AllToAll
from titan_moe.ops.linear import linear
from titan_moe.ops.move_rows import add_rows, copy_rows


class Borrowed:
    """An exchange of the weights of lent experts. No tuple: FSDP would look for tensors in it.

    Args:
        experts: this rank's experts that it lends, in the order of the ranks that borrow them.
        exchange: takes them there.
    """

    def __init__(self, experts: list[int], exchange: AllToAll, num_local: int, like: Tensor):
        self.exchange, self.num_local = exchange, num_local
        self._source_M = torch.tensor(experts, dtype=torch.int64, device=like.device)
        copies: list[list[int]] = [[n] for n in range(num_local)]
        first_home = num_local + sum(exchange.received)
        for place, expert in enumerate(experts):
            copies[expert].append(first_home + place)
        most = max(map(len, copies))
        table = [[*rows, *[-1] * (most - len(rows))] for rows in copies]
        self._rows_EK = torch.tensor(table, device=like.device)

    def join(self, w: Tensor) -> Tensor:
        """Returns weights of this rank's experts, and behind them those of borrowed ones. Backward:
        the gradients of an expert's copies come home and are added up, in float32 or wider."""
        return linear(w, self._join, self._add_up, self._rows_EK)

    def _join(self, w: Tensor) -> Tensor:
        lent = copy_rows(w.flatten(1), self._source_M)
        borrowed = self.exchange.wait(self.exchange.start(lent))
        return torch.cat([w, borrowed.view(-1, *w.shape[1:])])

    def _add_up(self, grad: Tensor, rows_EK: Tensor) -> Tensor:
        back, rows = self.exchange.reverse(), grad.flatten(1)
        home = back.wait(back.start(rows[self.num_local :]))
        summed = add_rows(torch.cat([rows, home]), rows_EK)
        return summed.view(-1, *grad.shape[1:])
