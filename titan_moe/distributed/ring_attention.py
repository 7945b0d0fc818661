"""Attention over a row cut among ranks: keys and values travel around the ring (arXiv 2310.01889).

In step t a rank holds those of the rank t before it, and merges what its queries get from them by
log-sum-exp. No rank ever holds a whole row's keys. The backward goes around once more, and the
gradients of keys and values travel with them, one hop further, home.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from titan_moe.distributed.block_attention import (
    Block,
    BlockAttention,
    Upstream,
    accumulation_type,
)


class Ring(NamedTuple):
    """What a run around the ring does."""

    group: ProcessGroup
    attention: BlockAttention
    blocks: Sequence[Sequence[Block]]
    """By step; the first must let every query see a key."""
    scale: float


def ring_attention(q_BHSC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, ring: Ring) -> Tensor:
    """o_BHSC of this rank's queries over all ranks' keys and values; differentiable once."""
    return _RingAttention.apply(q_BHSC, k_BHSC, v_BHSC, ring)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHSC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, ring: Ring) -> Tensor:
        dims = [k_BHSC.shape[-1], v_BHSC.shape[-1]]
        own = torch.cat([k_BHSC, v_BHSC], -1)
        wide = accumulation_type(q_BHSC.dtype)
        out = q_BHSC.new_zeros(*q_BHSC.shape[:-1], dims[1], dtype=wide)
        lse = out.new_full(out.shape[:-1], float("-inf"))
        held = own
        for step, blocks in enumerate(ring.blocks):
            # The next ones are under way while these are attended to.
            arriving = _pass_on(held, ring.group) if step + 1 < len(ring.blocks) else None
            k, v = held.split(dims, -1)
            for queries, keys, mask in blocks:
                part = ring.attention.forward(
                    q_BHSC[:, :, queries], k[:, :, keys], v[:, :, keys], mask, ring.scale
                )
                _merge(out[:, :, queries], lse[:, :, queries], *part)
            held = arriving.wait() if arriving else held
        out = out.to(q_BHSC.dtype)
        ctx.save_for_backward(q_BHSC, own, out, lse)
        ctx.ring, ctx.dims = ring, dims
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BHSC: Tensor):  # type: ignore[override, no-untyped-def]
        q_BHSC, held, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        delta = (grad_BHSC.to(lse.dtype) * out).sum(-1)
        upstream = Upstream(q_BHSC, grad_BHSC, lse, delta)
        grad_q = torch.zeros_like(q_BHSC, dtype=lse.dtype)
        travelling = None
        for step, blocks in enumerate(ring.blocks):
            arriving = _pass_on(held, ring.group) if step + 1 < len(ring.blocks) else None
            # Sums travel in at least float32: no rounding at each hop, for more bytes in bfloat16.
            grad_held = torch.zeros_like(held, dtype=lse.dtype)
            _add_block_gradients(
                grad_q, grad_held, upstream, held.split(ctx.dims, -1), blocks, ring
            )
            if travelling:
                grad_held += travelling.wait()
            travelling = _pass_on(grad_held, ring.group)
            held = arriving.wait() if arriving else held
        assert travelling
        grad_k, grad_v = travelling.wait().to(held.dtype).split(ctx.dims, -1)
        return grad_q.to(q_BHSC.dtype), grad_k, grad_v, None


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Make `out` and `lse` those of both sets of keys. One of the two sets must not be empty."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp()[..., None]).addcmul_(part, (part_lse - total).exp()[..., None])
    lse.copy_(total)


def _add_block_gradients(
    grad_q: Tensor,
    grad_held: Tensor,
    upstream: Upstream,
    held: Sequence[Tensor],
    blocks: Sequence[Block],
    ring: Ring,
) -> None:
    k, v = held
    grad_k, grad_v = grad_held.split([k.shape[-1], v.shape[-1]], -1)
    for queries, keys, mask in blocks:
        block_q, block_k, block_v = ring.attention.backward(
            upstream.of(queries), k[:, :, keys], v[:, :, keys], mask, ring.scale
        )
        grad_q[:, :, queries] += block_q
        grad_k[:, :, keys] += block_k
        grad_v[:, :, keys] += block_v


class _OnTheWay(NamedTuple):
    works: list[Any]
    leaving: Tensor
    """Kept until it is sent: its memory must not be given to another tensor before."""
    arriving: Tensor

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.arriving


def _pass_on(x: Tensor, group: ProcessGroup) -> _OnTheWay:
    """Send `x`, which must not change, to the next rank while the previous one's comes in."""
    rank, size = group.rank(), group.size()
    arriving = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % size),
    ]
    return _OnTheWay(dist.batch_isend_irecv(operations), x, arriving)
