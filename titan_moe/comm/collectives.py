"""Collectives of rows and parts of sequences, with gradients; of counts, which ranks exchange
before rows; and of a step's sums."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup
from torch.library import Library, impl

from titan_moe.comm.turns import BACKWARD, FORWARD, Turns
from titan_moe.ops.linear import linear

# Recomputation by operation keeps what an operation returns; the usual forms return nothing, but
# write into an argument.
_functional = torch.ops._c10d_functional

# --- rows and sequences, differentiable ---


class RowExchange(Protocol):
    """An exchange of rows between ranks, which goes both ways."""

    def reverse(self) -> "RowExchange":
        """Returns the exchange that sends the received rows back, as gradients travel."""

    def start(self, x_RD: Tensor) -> Tensor:
        """Returns the rows that are being received; `wait` of an equal exchange makes them
        readable."""

    def wait(self, in_flight: Tensor) -> Tensor:
        """Returns the received rows, in the order of their source ranks."""


class AllToAll:
    """An all-to-all of rows: `sent[p]` consecutive rows go to each rank p, `received[p]` come from
    it.

    It is no tuple: FSDP looks for tensors in all tuples that a unit is given, number by number.
    """

    def __init__(self, sent: list[int], received: list[int], group: ProcessGroup) -> None:
        self.sent, self.received, self.group = sent, received, group

    @staticmethod
    def of_table(group: ProcessGroup) -> "AllToAll":
        """Returns the exchange that sends row p of a table to each rank p."""
        ones = [1] * group.size()
        return AllToAll(ones, ones, group)

    def reverse(self) -> "AllToAll":
        return AllToAll(self.received, self.sent, self.group)

    def start(self, x_RD: Tensor) -> Tensor:
        if len(self.sent) == 1:
            return x_RD
        keep = None if torch.compiler.is_compiling() else _keep.get()
        # Not counts: decisions that follow from them are replayed.
        return keep(self._send, x_RD) if keep and x_RD.is_floating_point() else self._send(x_RD)

    def _send(self, x_RD: Tensor) -> Tensor:
        name = self.group.group_name
        return _functional.all_to_all_single(x_RD.contiguous(), self.received, self.sent, name)

    def wait(self, in_flight: Tensor) -> Tensor:
        return in_flight if len(self.sent) == 1 else _functional.wait_tensor(in_flight)


class InFlight:
    """The handle of an exchange under way, of counts or of rows.

    `wait` returns the received tensor, once, and drops it: a caller that keeps the handle keeps no
    memory of rows.
    """

    def __init__(self, received: Tensor, exchange: RowExchange, turns: Turns | None = None) -> None:
        self.exchange, self.turns = exchange, turns
        self._received: Tensor | None = received

    def wait(self) -> Tensor:
        return self.exchange.wait(self.take())

    def take(self) -> Tensor:
        """Returns the tensor that is being received; `RowExchange.wait` makes it readable."""
        received, self._received = self._received, None
        assert received is not None, "an exchange is waited for once"
        return received


def start_numbers(numbers: Tensor, exchange: RowExchange) -> InFlight:
    """Start an exchange of whole numbers, which have no gradient. The device waits for the result;
    the host does not."""
    return InFlight(exchange.start(numbers), exchange)


def exchange_rows(x_RD: Tensor, exchange: RowExchange) -> Tensor:
    """Returns the received rows, in the order of source ranks. Backward: the reverse exchange."""
    return wait_for_rows(start_rows(x_RD, exchange))


class RowsInFlight(NamedTuple):
    """Rows between `start_rows` and `wait_for_rows`."""

    carrier: Tensor
    """One element in the shape of the sent rows, with strides of 0. It links start and wait in
    autograd: its gradient is the reverse exchange, under way."""
    handle: InFlight
    """The received rows; without a gradient."""


def start_rows(x_RD: Tensor, exchange: RowExchange, turns: Turns | None = None) -> RowsInFlight:
    """Start an exchange; only `wait_for_rows` makes its result readable.

    Work between the two calls overlaps with the exchange: NCCL has a stream of its own, gloo a
    thread. The backward of that work overlaps with the reverse exchange, because autograd runs
    nodes in the opposite order: the backward of `wait_for_rows` starts the exchange of the
    gradients, and that of `start_rows` waits for it.

    `turns`: shared with other work of this process, which runs before anything is waited for.
    """
    carrier, received = _StartRows.apply(x_RD, exchange, turns)
    return RowsInFlight(carrier, InFlight(received, exchange, turns))


def wait_for_rows(rows: RowsInFlight) -> Tensor:
    """Returns the received rows of `start_rows`, in the order of source ranks. Call it once."""
    if rows.handle.turns is not None:
        rows.handle.turns.pass_on(FORWARD)
    received, exchange = rows.handle.take(), rows.handle.exchange
    return linear(
        rows.carrier,
        lambda _: exchange.wait(received).detach(),
        lambda grad_RD: exchange.reverse().start(grad_RD),
    )


def recomputing() -> bool:
    """Returns whether a backward runs, so that a forward in it is a recomputation."""
    if torch.compiler.is_compiling():  # A graph recomputes by itself.
        return False
    return torch._C._current_graph_task_id() != -1


def never_kept() -> AbstractContextManager:
    """Marks exchanges whose results recomputation never keeps: no backward needs them, as those
    after a layer's experts, or they are cheaper to exchange again."""
    # In a layer that is one graph, the partitioner decides.
    return nullcontext() if torch.compiler.is_compiling() else keeping_exchanges(None)


Keep = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
_keep: ContextVar[Keep | None] = ContextVar("_keep", default=None)


@contextmanager
def keeping_exchanges(keep: Keep | None) -> Iterator[None]:
    """Lets `keep` start each exchange of rows: it is given the function that does, and the rows."""
    before = _keep.set(keep)
    try:
        yield
    finally:
        _keep.reset(before)


def all_gather_rows(x_RD: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Returns all ranks' rows in rank order; rank p has `sizes[p]`. Backward:
    `reduce_scatter_rows`.

    An all-to-all sends them: it takes uneven sizes on every backend and moves the same bytes. Its
    price is a send buffer with a copy for each rank.
    """
    return linear(x_RD, _all_gather, _reduce_scatter, sizes=list(sizes), group=group)


def reduce_scatter_rows(x_RD: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """Returns the sum over ranks of this rank's `sizes[rank]` rows. Backward: `all_gather_rows`.

    The receiver adds the terms in rank order: the same bits at every repeat, on every backend.
    """
    return linear(x_RD, _reduce_scatter, _all_gather, sizes=list(sizes), group=group)


def gather_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns all ranks' parts of a sequence, in rank order, along the last dim but one.

    Backward: `scatter_tokens`, since each rank's gradient is a term of a sum.
    """
    return linear(x, _gather_tokens, _scatter_tokens, group=group)


def scatter_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns this rank's part of the sequence, summed over ranks. Backward: `gather_tokens`.

    The last dim but one must divide by the number of ranks.
    """
    return linear(x, _scatter_tokens, _gather_tokens, group=group)


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns the sum over ranks, on each of them. Backward: the same, since each rank's gradient
    is a term of a sum."""
    return linear(x, _all_reduce, _all_reduce, group=group)


def gather_summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns all ranks' tensors of one shape, stacked in rank order: [P, *x.shape]. Backward: all
    ranks' gradients, summed in rank order."""
    return linear(x, gather_parts, _sum_of_own, group=group)


def _sum_of_own(stacked: Tensor, group: ProcessGroup) -> Tensor:
    return reduce_scatter_rows(stacked, [1] * group.size(), group)[0]


def gather_parts(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns all ranks' tensors of one shape, stacked: [P, *x.shape]. Has no gradient."""
    return _gathered(x, group).view(group.size(), *x.shape)


def _gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """Returns all ranks' tensors of one shape, joined along the first dim in rank order."""
    gathered = _functional.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)
    return _functional.wait_tensor(gathered)


_kernels = Library("_c10d_functional", "IMPL")


@impl(_kernels, "all_gather_into_tensor", "CPU")
def _all_gather_on_cpu(x: Tensor, group_size: int, group_name: str) -> Tensor:
    """Takes the place of torch's kernel, by which DTensor gathers, too: gloo notes the name of the
    last operation from two threads without a lock. That of torch's kernel needs the heap (over 15
    characters), and ranks died of it (torch 2.13)."""
    gathered = x.new_empty(group_size, *x.shape)
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    dist.all_gather(list(gathered.unbind()), x.contiguous(), group=group)
    return gathered.flatten(0, 1) if x.ndim else gathered


def _exchange(x_RD: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    exchange = AllToAll(sent, received, group)
    return exchange.wait(exchange.start(x_RD))


def _all_gather(x_RD: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
    copies = x_RD.repeat(len(sizes), *[1] * (x_RD.ndim - 1))
    return _exchange(copies, [len(x_RD)] * len(sizes), sizes, group)


def _reduce_scatter(x_RD: Tensor, sizes: list[int], group: ProcessGroup) -> Tensor:
    own = sizes[dist.get_rank(group)]
    terms_RD = _exchange(x_RD, sizes, [own] * len(sizes), group)
    return terms_RD.unflatten(0, (len(sizes), own)).sum(0)


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    return _functional.wait_tensor(_functional.all_reduce(x.contiguous(), "sum", group.group_name))


class _StartRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x_RD: Tensor, exchange: RowExchange, turns: Turns | None
    ) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.turns = exchange, turns  # type: ignore[attr-defined]
        in_flight = exchange.start(x_RD)
        if in_flight is x_RD:  # A group of one rank returns its argument.
            in_flight = x_RD.detach()
        ctx.mark_non_differentiable(in_flight)
        ctx.set_materialize_grads(False)  # Else the backward makes zeros of all rows for it.
        # No view, of which FSDP would warn after experts in parts.
        return x_RD.new_empty_strided(x_RD.shape, (0,) * x_RD.ndim), in_flight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_in_flight: Tensor, _):  # type: ignore[override, no-untyped-def]
        if ctx.turns is not None:
            ctx.turns.pass_on(BACKWARD)
        return ctx.exchange.reverse().wait(grad_in_flight), None, None


# torch's micro-pipeline pass knows these two forms: gather, chunk, cat; and chunk, cat, scatter.


def _gather_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    gathered = _gathered(x, group)
    if _is_one_sequence(x):
        return gathered.view(1, -1, x.shape[-1])
    return torch.cat(gathered.chunk(group.size()), x.ndim - 2)


def _scatter_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    size, is_one = group.size(), _is_one_sequence(x)
    terms = x.reshape(size, -1, x.shape[-1]) if is_one else torch.cat(x.chunk(size, x.ndim - 2))
    own = _functional.reduce_scatter_tensor(terms.contiguous(), "sum", size, group.group_name)
    return _functional.wait_tensor(own)


def _is_one_sequence(x: Tensor) -> bool:
    """Returns whether parts of sequences lie one after the other, in no need of a copy. The pass,
    which does without one itself, wants the forms as they are."""
    return x.ndim == 3 and len(x) == 1 and not torch.compiler.is_compiling()


# --- counts ---


def to_host(*vectors: Tensor) -> list[list[int]]:
    """Returns several vectors as Python ints, with one wait for the device."""
    numbers = iter(torch.cat(vectors).tolist())
    return [[next(numbers) for _ in range(len(vector))] for vector in vectors]


# --- sums of a step's terms ---


def sum_over_world(terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns every term's sum over all ranks, in its shape, as float64: whole numbers stay exact
    up to 2^53. Collective, with one all-reduce for all terms; waits for no device.

    `terms` are on one device, and have the same names in the same order on every rank.
    """
    flat = torch.cat([term.reshape(-1).double() for term in terms.values()])
    dist.all_reduce(flat)
    pieces = flat.split([term.numel() for term in terms.values()])
    return {
        name: piece.view(term.shape)
        for (name, term), piece in zip(terms.items(), pieces, strict=True)
    }


def read(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the sums that are single numbers, with one wait for the device."""
    single = {name: value for name, value in sums.items() if value.ndim == 0}
    return dict(zip(single, torch.stack(list(single.values())).tolist(), strict=True))


def added(terms: Iterable[Tensor], *, like: Tensor) -> Tensor:
    """Returns the sum of scalars. Without any, it is 0 in the type and on the device of `like`."""
    terms = list(terms)
    return torch.stack(terms).sum() if terms else torch.zeros_like(like)
