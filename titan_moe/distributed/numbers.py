"""Whole numbers that ranks tell each other beside the rows: how many come, and what belongs to
which. They have no gradient and no part in recomputation, which keeps other collectives' results
in the order of their calls."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Told:
    """Numbers that are under way."""

    def __init__(self, numbers: Tensor, work: dist.Work | None) -> None:
        self._numbers, self._work = numbers, work

    def heard(self) -> Tensor:
        """They, arrived: the device waits for them, the host does not where it has a choice."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._numbers


def tell_table(told_P: Tensor, group: ProcessGroup) -> Told:
    """Send row p of a table to rank p; hear a row from each, in their order."""
    if len(told_P) == 1:
        return Told(told_P, None)
    heard_P = torch.empty_like(told_P)
    return Told(heard_P, dist.all_to_all_single(heard_P, told_P, group=group, async_op=True))


def tell(told_N: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Told:
    """As `tell_table`, but `sent[p]` consecutive numbers, or rows of them, to each rank p."""
    if len(sent) == 1:
        return Told(told_N, None)
    heard_N = told_N.new_empty(sum(received), *told_N.shape[1:])
    work = dist.all_to_all_single(heard_N, told_N, received, sent, group=group, async_op=True)
    return Told(heard_N, work)


def to_host(*vectors: Tensor) -> list[list[int]]:
    """Several vectors as Python ints, in one wait for the device."""
    numbers = iter(torch.cat(vectors).tolist())
    return [[next(numbers) for _ in range(len(vector))] for vector in vectors]
