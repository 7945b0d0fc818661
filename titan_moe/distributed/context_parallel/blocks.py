"""Attention of some queries to some keys of a sequence, given the positions of all of them.

Context parallelism computes this on one rank, between its collectives. Positions must ascend.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.ops.attention import is_seen, sdpa
from titan_moe.ops.flex_attention import Flex
from titan_moe.ops.operation import at_least_float32


class Block(NamedTuple):
    """Queries and keys that may see each other."""

    queries: slice
    keys: slice
    mask: Any
    """The pairs that see each other, in the form that the attention takes; None: all do."""


class Upstream(NamedTuple):
    """Holds what the backward of a block of attention needs of its queries, over all blocks."""

    q_BHSC: Tensor
    grad_BHSC: Tensor
    """The gradient of the output."""
    lse_BHS: Tensor
    """Logarithm of the softmax's divisor over the sequence's keys, and the sink if there is one."""
    delta_BHS: Tensor
    """The product of the output with its gradient."""

    def of(self, queries: slice) -> "Upstream":
        return Upstream(*(x[:, :, queries] for x in self))


class ExplicitBlocks:
    """Masks [B, 1, queries, keys] in memory: any device, heads and type; the CPU's way.

    Queries are cut in two halves. Each half leaves out the keys after its last query and those
    before all that it sees: with head-tail balance that is half of the work. Queries at the end
    that see no key are left out too.
    """

    def blocks(self, first_BS: Tensor, queries_S: Tensor, keys_S: Tensor) -> list[Block]:
        """Returns blocks that hold each visible pair once, in the queries' order.

        Args:
            first_BS: `first_seen_in_sequences`, of whole sequences.
            queries_S, keys_S: their positions in the sequence, ascending; on the same device.
        """
        half = len(queries_S) // 2
        halves = (0, half), (half, len(queries_S))
        found = (_block(first_BS, queries_S, keys_S, *ends) for ends in halves)
        return [block for block in found if block is not None]

    attend = staticmethod(sdpa)
    """Returns o_BHSC, differentiable; every query must see a key."""

    def forward(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC, v_BHSC, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns o_BHSC and the natural logarithm lse_BHS of the softmax's divisor; no gradient.

        A query that sees no key of the block gets 0 and -inf.
        """
        wide = at_least_float32(q_BHSC)
        heads = k_BHSC.shape[1]
        scores = _scores(_grouped(q_BHSC, heads).to(wide), k_BHSC.to(wide), mask, scale)
        lse = scores.logsumexp(-1)
        # A query without keys gets 0; exp(-inf + inf), without the clamp, would be NaN.
        weights = scores.sub_(lse.clamp_min(torch.finfo(wide).min)[..., None]).exp_()
        return _ungrouped(weights @ v_BHSC.to(wide), q_BHSC), _ungrouped(lse, q_BHSC)

    def backward(  # type: ignore[no-untyped-def]
        self, upstream: Upstream, k_BHSC, v_BHSC, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns this block's terms of the gradients of q, k and v."""
        wide = at_least_float32(k_BHSC)
        heads = k_BHSC.shape[1]
        q, grad, lse, delta = (_grouped(x, heads).to(wide) for x in upstream)
        k, v = k_BHSC.to(wide), v_BHSC.to(wide)
        weights = _scores(q, k, mask, scale).sub_(lse[..., None]).exp_()
        grad_v = weights.mT @ grad
        grad_scores = (grad @ v.mT).sub_(delta[..., None]).mul_(weights).mul_(scale)
        grad_q = _ungrouped(grad_scores @ k, upstream.q_BHSC)
        return grad_q, grad_scores.mT @ q, grad_v


class FlexBlocks(Flex):
    """Computes what `ExplicitBlocks` does with flex attention, which skips masked tiles by itself:
    one block of one size in every step."""

    def blocks(self, first_BS: Tensor, queries_S: Tensor, keys_S: Tensor) -> list[Block]:
        mask = self.block_mask(queries_S, keys_S, first_BS[:, queries_S])
        return [Block(slice(None), slice(None), mask)]

    forward = Flex.with_lse

    def backward(  # type: ignore[no-untyped-def]
        self, upstream: Upstream, k_BHSC, v_BHSC, mask: Any, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Flex takes no log-sum-exp over other blocks in its backward, so this block's forward runs
        # again, and the merge of blocks is differentiated by hand: 2 matrix products more than 5.
        q, k, v = (x.detach().requires_grad_() for x in (upstream.q_BHSC, k_BHSC, v_BHSC))
        with torch.enable_grad():
            o_BHSC, lse_BHS = self.forward(q, k, v, mask, scale)
        share_BHS = (lse_BHS.detach() - upstream.lse_BHS).exp()
        grad = upstream.grad_BHSC.to(share_BHS.dtype)
        inner_BHS = (grad * o_BHSC.detach()).sum(-1)
        grads = [
            (grad * share_BHS[..., None]).to(o_BHSC.dtype),
            (share_BHS * (inner_BHS - upstream.delta_BHS)).to(lse_BHS.dtype),
        ]
        return torch.autograd.grad([o_BHSC, lse_BHS], [q, k, v], grads)  # type: ignore[return-value]


BlockAttention = ExplicitBlocks | FlexBlocks
"""Computes attention within a block. Keys and values may have fewer heads than queries."""


def _block(
    first_BS: Tensor, queries_S: Tensor, keys_S: Tensor, start: int, end: int
) -> Block | None:
    """Returns the block of the queries from `start` to `end` that see keys, and of the keys
    that they see; None if there are none."""
    at_S = queries_S[start:end]
    if not len(at_S):
        return None
    first_BS = first_BS[:, at_S]
    # First positions ascend, so the keys that no query sees are at the edges. Reads
    # that wait for a device, if the documents are on one.
    keys = slice(int((keys_S < int(first_BS[:, 0].min())).sum()), int((keys_S <= at_S[-1]).sum()))
    if keys.start >= keys.stop:
        return None
    keys_S = keys_S[keys]
    num_queries = int((first_BS.amin(0) <= int(keys_S[-1])).sum())
    at_S, first_BS = at_S[:num_queries], first_BS[:, :num_queries]
    all_seen = at_S[0] >= keys_S[-1] and int(first_BS[:, -1].max()) <= keys_S[0]
    queries = slice(start, start + num_queries)
    if all_seen:
        return Block(queries, keys, None)
    at_S, keys_S = at_S.to(first_BS.device), keys_S.to(first_BS.device)
    return Block(queries, keys, is_seen(at_S, keys_S, first_BS)[:, None])


def _scores(q: Tensor, k_BHSC: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Returns the scores of grouped queries: [B, kv heads, group * queries, keys]."""
    scores = (q @ k_BHSC.mT).mul_(scale)
    if mask is not None:
        scores.unflatten(2, (-1, mask.shape[2])).masked_fill_(~mask[:, :, None], float("-inf"))
    return scores


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """Turns [B, H, S, ...] into [B, kv heads, group * S, ...]: one product for a group of heads."""
    return x.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)


def _ungrouped(x: Tensor, like_BHSC: Tensor) -> Tensor:
    batch, heads, seq_len, _ = like_BHSC.shape
    return x.reshape(batch, heads, seq_len, *x.shape[3:])
