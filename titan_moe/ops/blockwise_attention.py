"""Attention over whole sequences on the CPU: blocks of queries, each with the keys up to it.

torch's kernels for the CPU multiply all pairs where keys and values differ in width (MLA's do), and
in bfloat16 spend most of their time on conversions. Half of a causal sequence's pairs are masked;
this leaves out all but half a block of them. On one core of a CPU with AVX-512 (8 sequences of 256
tokens), forward and backward take 0.4 to 0.5 (bfloat16) and 0.7 to 0.8 (float32) of the time of
torch's.

A CPU with AMX differs: whole steps of MLA models are 10 % (float32) and 32 % (bfloat16) faster than
with torch's, those of a GQA model 3 % slower and 7 % faster, and from 512 tokens on torch's kernels
are as fast.

The price is the probabilities, kept for the backward: callers send long sequences elsewhere.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_moe.ops.operation import at_least_float32

MAX_SEQ_LEN = 512
"""Beyond, the kept probabilities outweigh a layer's other activations: a step of 8 sequences of
1,024 tokens took 2,083 MiB with them and takes 1,375 without."""


def attend_in_blocks(
    q_BHSC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Computes o_BHSC = softmax(scale q k^T) v in causal order; k and v may have fewer heads.

    Scores and softmax are at least float32. They are rounded to the inputs' type before they
    multiply values and gradients, as in flash attention.

    Args:
        mask: bool, broadcast to [B, H, queries, keys]: the keys that a query sees, one at least and
            none after its own. None: all up to its own.
    """
    return _Blocks.apply(q_BHSC, k_BHSC, v_BHSC, mask, scale)


class _Blocks(torch.autograd.Function):
    """Attends in blocks. The N key heads of all sequences form a batch; G query heads share
    each."""

    @staticmethod
    def forward(ctx, q_BHSC, k_BHSC, v_BHSC, mask, scale):  # type: ignore[no-untyped-def]
        batch, num_heads, seq_len, _ = q_BHSC.shape
        num_rows = batch * k_BHSC.shape[1]
        q_NGSC = q_BHSC.reshape(num_rows, -1, *q_BHSC.shape[2:])
        k_NSC, v_NSC = k_BHSC.flatten(0, 1), v_BHSC.flatten(0, 1)
        wide = at_least_float32(q_BHSC)
        o_NGSC = v_BHSC.new_empty(*q_NGSC.shape[:3], v_BHSC.shape[-1])
        wide_k_NSC = k_NSC.to(wide)
        kept = []
        for queries, keys in _blocks(seq_len):
            q = _rows(q_NGSC, queries).to(wide).mul(scale)
            scores = torch.bmm(q, wide_k_NSC[:, keys].mT).view(batch, num_heads, -1, keys.stop)
            if mask is None:
                # Later keys are in the last square alone, and a sum is vectorised, unlike a fill.
                scores[..., queries].add_(_minus_infinity_after(scores))
            else:
                scores.masked_fill_(~mask[:, :, queries, keys], -torch.inf)
            p = scores.softmax(-1).to(q_BHSC.dtype)
            kept.append(p.view(num_rows, -1, keys.stop))
            o_NGSC[:, :, queries] = _heads(torch.bmm(kept[-1], v_NSC[:, keys]), q_NGSC)
        ctx.save_for_backward(q_NGSC, k_NSC, v_NSC, *kept)
        ctx.scale, ctx.q_shape, ctx.kv_shape = scale, q_BHSC.shape, k_BHSC.shape[:3]
        return o_NGSC.view(batch, num_heads, seq_len, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BHSC):  # type: ignore[no-untyped-def]
        q_NGSC, k_NSC, v_NSC, *kept = ctx.saved_tensors
        grad_NGSC = grad_BHSC.reshape(*q_NGSC.shape[:3], -1)
        dq_NGSC, nothing = torch.empty_like(q_NGSC), q_NGSC.new_empty(())
        dk_NSC: Any = None
        dv_NSC: Any = None
        # The last block comes first: it sees all keys, and the others add to its gradients.
        for (queries, keys), p in reversed(list(zip(_blocks(q_NGSC.shape[2]), kept, strict=True))):
            grad = _rows(grad_NGSC, queries)
            dp = torch.bmm(grad, v_NSC[:, keys].mT)
            dscores = torch._softmax_backward_data(dp, p, -1, p.dtype)
            dq = torch.baddbmm(nothing, dscores, k_NSC[:, keys], beta=0, alpha=ctx.scale)
            dq_NGSC[:, :, queries] = _heads(dq, q_NGSC)
            dk_NSC = _added(dk_NSC, torch.bmm(dscores.mT, _rows(q_NGSC, queries)))
            dv_NSC = _added(dv_NSC, torch.bmm(p.mT, grad))
        dk = dk_NSC.mul_(ctx.scale).to(k_NSC.dtype)
        dk, dv = (x.view(*ctx.kv_shape, -1) for x in (dk, dv_NSC.to(v_NSC.dtype)))
        return dq_NGSC.view(ctx.q_shape), dk, dv, None, None


def _blocks(seq_len: int) -> Iterator[tuple[slice, slice]]:
    """Returns the positions of each block's queries, and of the keys that some of them see."""
    # Measured: quarters of short sequences; smaller blocks are too many calls, larger waste pairs.
    size = min(max(seq_len // 4, 16), 128)
    for start in range(0, seq_len, size):
        stop = min(start + size, seq_len)
        yield slice(start, stop), slice(0, stop)


def _rows(x_NGSC: Tensor, queries: slice) -> Tensor:
    """Returns the block's queries, those of heads that share keys side by side: [N, G s, C]."""
    return x_NGSC[:, :, queries].flatten(1, 2)


def _heads(x_NsC: Tensor, like_NGSC: Tensor) -> Tensor:
    return x_NsC.unflatten(1, (like_NGSC.shape[1], -1))


def _added(sum_NSC: Tensor | None, part_NsC: Tensor) -> Tensor:
    """Adds a block's term for the first `s` keys to the sum over blocks, in at least float32."""
    if sum_NSC is None:
        return part_NsC.to(at_least_float32(part_NsC))
    sum_NSC[:, : part_NsC.shape[1]] += part_NsC
    return sum_NSC


def _minus_infinity_after(scores: Tensor) -> Tensor:
    """Returns -inf for keys after each of a block's queries, 0 elsewhere: [queries, queries]."""
    num_queries = scores.shape[-2]
    return scores.new_full((num_queries, num_queries), -torch.inf).triu_(1)
