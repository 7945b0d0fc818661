"""Attention over sequences cut among ranks: keys and values go round the ring (arXiv 2310.01889).

In each step a rank holds keys and values of a rank before it, and merges its queries' results by
log-sum-exp. No rank ever holds a whole sequence's keys. The backward goes around once more, and the
gradients of keys and values travel with them, the last hop back to their own rank.

A sink joins the softmax after the last step, as if its one logit were a block with the value 0.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from titan_moe.distributed.context_parallel.blocks import Block, BlockAttention, Upstream
from titan_moe.ops.operation import at_least_float32


class Ring(NamedTuple):
    """Holds the group, the attention and the steps of a run around the ring."""

    group: ProcessGroup
    attention: BlockAttention
    steps: Sequence[Sequence[Block]]
    """The blocks that this rank computes with the keys and values of the rank 0, 1, 2, ... places
    before it. The first must let every query see a key; others may be empty."""
    scale: float


class RingFunction(torch.autograd.Function):
    """Computes o_BHSC of this rank's queries over all ranks' keys and values; differentiable once.

    Each rank gets its own queries' part of the sinks' gradient.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, q_BHSC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, sinks_H: Tensor | None, ring: Ring
    ):
        dims = [k_BHSC.shape[-1], v_BHSC.shape[-1]]
        own = torch.cat([k_BHSC, v_BHSC], -1)
        wide = at_least_float32(q_BHSC)
        out = q_BHSC.new_zeros(*q_BHSC.shape[:-1], dims[1], dtype=wide)
        lse = out.new_full(out.shape[:-1], float("-inf"))
        held = own
        for number, blocks in enumerate(ring.steps, 1):
            # The next ones are under way while these are attended to.
            arriving = _pass_on(held, ring.group) if number < len(ring.steps) else None
            k, v = held.split(dims, -1)
            for queries, keys, mask in blocks:
                part = ring.attention.forward(
                    q_BHSC[:, :, queries], k[:, :, keys], v[:, :, keys], mask, ring.scale
                )
                _merge(out[:, :, queries], lse[:, :, queries], *part)
            held = arriving.wait() if arriving else held
        if sinks_H is not None:
            _merge(out, lse, out.new_zeros(()), sinks_H[:, None].to(wide))
        out = out.to(q_BHSC.dtype)
        ctx.save_for_backward(q_BHSC, own, out, lse, sinks_H)
        ctx.ring, ctx.dims = ring, dims
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BHSC: Tensor):  # type: ignore[override, no-untyped-def]
        q_BHSC, held, out, lse, sinks_H = ctx.saved_tensors
        ring: Ring = ctx.ring
        delta = (grad_BHSC.to(lse.dtype) * out).sum(-1)
        upstream = Upstream(q_BHSC, grad_BHSC, lse, delta)
        grad_q = torch.zeros_like(q_BHSC, dtype=lse.dtype)
        travelling = None
        for number, blocks in enumerate(ring.steps, 1):
            arriving = _pass_on(held, ring.group) if number < len(ring.steps) else None
            k, v = held.split(ctx.dims, -1)
            # Sums travel in at least float32: no rounding at each hop, for more bytes in bfloat16.
            grad_held = torch.zeros_like(held, dtype=lse.dtype)
            grad_k, grad_v = grad_held.split(ctx.dims, -1)
            for queries, keys, mask in blocks:
                block_q, block_k, block_v = ring.attention.backward(
                    upstream.of(queries), k[:, :, keys], v[:, :, keys], mask, ring.scale
                )
                grad_q[:, :, queries] += block_q
                grad_k[:, :, keys] += block_k
                grad_v[:, :, keys] += block_v
            if travelling:
                grad_held += travelling.wait()
            travelling = _pass_on(grad_held, ring.group)
            held = arriving.wait() if arriving else held
        assert travelling
        grad_k, grad_v = travelling.wait().to(held.dtype).split(ctx.dims, -1)
        grad_sinks = None if sinks_H is None else _gradient_of_sinks(sinks_H, upstream)
        return grad_q.to(q_BHSC.dtype), grad_k, grad_v, grad_sinks, None


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge another set of keys into `out` and `lse`. One of the two sets must not be empty."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp()[..., None]).addcmul_(part, (part_lse - total).exp()[..., None])
    lse.copy_(total)


def _gradient_of_sinks(sinks_H: Tensor, upstream: Upstream) -> Tensor:
    """Returns the gradient of sinks. A logit whose value is 0 gets its weight times -delta."""
    weights_BHS = (sinks_H[:, None].to(upstream.lse_BHS.dtype) - upstream.lse_BHS).exp()
    return -(weights_BHS * upstream.delta_BHS).sum((0, 2)).to(sinks_H.dtype)


class _OnTheWay(NamedTuple):
    works: list[Any]
    leaving: Tensor
    """Kept until it is sent, so that no other tensor gets its memory."""
    arriving: Tensor

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.arriving


def _pass_on(x: Tensor, group: ProcessGroup) -> _OnTheWay:
    """Sends `x`, which must not change, to the next rank, and receives that of the rank before."""
    rank, size = group.rank(), group.size()
    arriving = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % size),
    ]
    return _OnTheWay(dist.batch_isend_irecv(operations), x, arriving)
