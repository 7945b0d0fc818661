"""Collectives that autograd can pass through: uneven numbers of rows, and parts of sequences."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup

# Recomputation by operation keeps what an operation returns; the usual forms return nothing, but
# write into an argument.
_functional = torch.ops._c10d_functional


class Turns(Protocol):
    """Lets something else compute while rows travel: called between an exchange's start and its
    wait."""

    def in_forward(self) -> None: ...

    def in_backward(self) -> None: ...


class NoTurns:
    """Nothing else has a turn."""

    def in_forward(self) -> None:
        pass

    def in_backward(self) -> None:
        pass


class Exchange(NamedTuple):
    """An all-to-all of rows: `sent[p]` consecutive ones to each rank p, `received[p]` from it."""

    sent: list[int]
    received: list[int]
    group: ProcessGroup
    turns: Turns = NoTurns()

    def reverse(self) -> "Exchange":
        return self._replace(sent=self.received, received=self.sent)


def all_to_all_rows(
    x_RD: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup
) -> Tensor:
    """Send `sent[p]` consecutive rows to each rank p, and receive `received[p]` rows from it.

    The backward is the reverse exchange of the gradients.

    Returns:
        The received rows, in the order of their source ranks.
    """
    exchange = Exchange(list(sent), list(received), group)
    return wait_rows(start_rows(x_RD, exchange), exchange)


class _Flight:
    """Rows, or later their gradients, on their way."""

    rows: Tensor | None = None

    def land(self) -> Tensor:
        assert self.rows is not None, "nothing is under way"
        rows, self.rows = self.rows, None
        return rows


class Travelling(NamedTuple):
    """Rows that `start_rows` let go, for `wait_rows`."""

    carrier: Tensor
    """Empty: it links the two in autograd, which would refuse gradients of another number of
    rows."""
    flight: _Flight


def start_rows(x_RD: Tensor, exchange: Exchange) -> Travelling:
    """Let rows travel; for `wait_rows` alone, which makes the result readable.

    What the program computes between the two runs beside the exchange, on the stream that it would
    use anyway: NCCL has one of its own, gloo a thread. So does its backward run beside the reverse
    exchange: autograd takes nodes in the opposite order of their making, `wait_rows`'s backward
    starts the gradients' way back, and `start_rows`'s waits for it.
    """
    flight = _Flight()
    return Travelling(_StartRows.apply(x_RD, exchange, flight), flight)


def wait_rows(travelling: Travelling, exchange: Exchange) -> Tensor:
    """The received rows of `start_rows`, in the order of their source ranks; once."""
    return _WaitRows.apply(travelling.carrier, exchange, travelling.flight)


def all_gather_rows(x_RD: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """All ranks' rows in rank order; rank p has `sizes[p]`. Backward: `reduce_scatter_rows`.

    Sent as an all-to-all, which takes uneven sizes on every backend and moves the same bytes; its
    price is a send buffer with a copy for each rank.
    """
    return _AllGatherRows.apply(x_RD, list(sizes), group)


def reduce_scatter_rows(x_RD: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """The sum over ranks of this rank's `sizes[rank]` rows. Backward: `all_gather_rows`.

    The terms are added in rank order, here: the same bits at every repeat, whatever the backend.
    """
    return _ReduceScatterRows.apply(x_RD, list(sizes), group)


def gather_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """All ranks' parts of a sequence, in rank order, along the last dim but one.

    Backward: `scatter_tokens`, since each rank's gradient is a part of a sum.
    """
    return _GatherTokens.apply(x, group)


def scatter_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over ranks, of which each keeps its part of the sequence. Backward: `gather_tokens`.

    The last dim but one must divide by the number of ranks.
    """
    return _ScatterTokens.apply(x, group)


def gather_parts(x: Tensor, group: ProcessGroup) -> Tensor:
    """All ranks' tensors of one shape, stacked in rank order: [P, *x.shape]. Has no gradient."""
    parts = _functional.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)
    return _functional.wait_tensor(parts).view(group.size(), *x.shape)


def _start(x_RD: Tensor, exchange: Exchange) -> Tensor:
    sent, received, group, _ = exchange
    if len(sent) == 1:
        return x_RD
    return _functional.all_to_all_single(x_RD.contiguous(), received, sent, group.group_name)


def _wait(x_RD: Tensor, exchange: Exchange) -> Tensor:
    return x_RD if len(exchange.sent) == 1 else _functional.wait_tensor(x_RD)


def _exchange(x_RD: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    exchange = Exchange(sent, received, group)
    return _wait(_start(x_RD, exchange), exchange)


def _all_gather(x_RD: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
    copies = x_RD.repeat(len(sizes), *[1] * (x_RD.ndim - 1))
    return _exchange(copies, [len(x_RD)] * len(sizes), sizes, group)


def _reduce_scatter(x_RD: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
    own = sizes[dist.get_rank(group)]
    terms_RD = _exchange(x_RD, sizes, [own] * len(sizes), group)
    return terms_RD.unflatten(0, (len(sizes), own)).sum(0)


class _StartRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_RD: Tensor, exchange: Exchange, flight: _Flight) -> Tensor:
        ctx.exchange, ctx.flight = exchange, flight  # type: ignore[attr-defined]
        flight.rows = _start(x_RD, exchange)
        return x_RD.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override, no-untyped-def]
        ctx.exchange.turns.in_backward()
        return _wait(ctx.flight.land(), ctx.exchange), None, None


class _WaitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, carrier: Tensor, exchange: Exchange, flight: _Flight) -> Tensor:
        ctx.exchange, ctx.flight = exchange, flight  # type: ignore[attr-defined]
        exchange.turns.in_forward()
        rows_RD = _wait(flight.land(), exchange)
        return rows_RD.detach()  # Who is alone is handed what it gave away, history and all.

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD: Tensor):  # type: ignore[override, no-untyped-def]
        ctx.flight.rows = _start(grad_RD, ctx.exchange.reverse())
        return grad_RD.new_empty(0), None, None


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_RD: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
        ctx.layout = (sizes, group)  # type: ignore[attr-defined]
        return _all_gather(x_RD, sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD: Tensor):  # type: ignore[override, no-untyped-def]
        return _reduce_scatter(grad_RD, *ctx.layout), None, None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_RD: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
        ctx.layout = (sizes, group)  # type: ignore[attr-defined]
        return _reduce_scatter(x_RD, sizes, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD: Tensor):  # type: ignore[override, no-untyped-def]
        return _all_gather(grad_RD, *ctx.layout), None, None


def _gather_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    return gather_parts(x, group).movedim(0, -3).flatten(-3, -2)


def _scatter_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    parts = x.unflatten(-2, (group.size(), -1)).movedim(-3, 0).contiguous()
    own = _functional.reduce_scatter_tensor(
        parts.flatten(0, 1), "sum", group.size(), group.group_name
    )
    return _functional.wait_tensor(own)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return _gather_tokens(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override, no-untyped-def]
        return _scatter_tokens(grad, ctx.group), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return _scatter_tokens(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override, no-untyped-def]
        return _gather_tokens(grad, ctx.group), None
