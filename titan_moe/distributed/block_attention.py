"""Attention of some queries to some keys of a row, given where in the row each of them is.

What context parallelism computes on one rank, between its collectives. Positions must ascend.
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Block(NamedTuple):
    """Queries and keys that may see each other."""

    queries: slice
    keys: slice
    mask: Any
    """Which of them do; what it is depends on the attention, None: all."""


class Upstream(NamedTuple):
    """What the backward of a block needs to know of its queries, over all blocks."""

    q_BHSC: Tensor
    grad_BHSC: Tensor
    """The gradient of the output."""
    lse_BHS: Tensor
    """Of the softmax over all keys of the row."""
    delta_BHS: Tensor
    """The product of the output with its gradient."""

    def of(self, queries: slice) -> "Upstream":
        return Upstream(*(x[:, :, queries] for x in self))


class BlockAttention(Protocol):
    """How a device attends within a block. Keys and values may have fewer heads than queries."""

    def blocks(self, documents_BS: Tensor, queries_S: Tensor, keys_S: Tensor) -> list[Block]:
        """Blocks that hold all visible pairs, in the queries' order; none if there are none.

        Args:
            documents_BS: the documents of whole rows.
            queries_S, keys_S: their positions in the row, ascending; on the CPU.
        """

    def attend(
        self, q_BHSC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, mask: Any, scale: float
    ) -> Tensor:
        """o_BHSC, differentiable; every query must see a key."""

    def forward(
        self, q_BHSC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, mask: Any, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Without gradient: o_BHSC, and the natural logarithm lse_BHS of the softmax's divisor.

        A query that sees no key of the block gets 0 and -inf.
        """

    def backward(
        self, upstream: Upstream, k_BHSC: Tensor, v_BHSC: Tensor, mask: Any, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This block's terms of the gradients of q, k and v."""


class ExplicitBlocks:
    """Masks [B, 1, queries, keys] in memory: any device, any type; the CPU's way.

    Queries are cut in two halves, and keys after the last query of each left out: where positions
    are head-tail balanced, that is all blocks in the future, half of the work.
    """

    def __init__(self, *, mask_documents: bool) -> None:
        self._mask_documents = mask_documents

    def blocks(self, documents_BS: Tensor, queries_S: Tensor, keys_S: Tensor) -> list[Block]:
        found = []
        half = len(queries_S) // 2
        for queries in (slice(0, half), slice(half, len(queries_S))):
            at_S = queries_S[queries]
            num_keys = int((keys_S <= at_S[-1]).sum()) if len(at_S) else 0
            if num_keys:
                keys = slice(0, num_keys)
                found.append(Block(queries, keys, self._mask(documents_BS, at_S, keys_S[keys])))
        return found

    def _mask(self, documents_BS: Tensor, queries_S: Tensor, keys_S: Tensor) -> Tensor | None:
        all_past = bool(queries_S[0] >= keys_S[-1])
        if all_past and not self._mask_documents:
            return None
        device = documents_BS.device
        past_SS = (queries_S[:, None] >= keys_S).to(device)
        if not self._mask_documents:
            return past_SS[None, None]
        queries_BS = documents_BS[:, queries_S.to(device)]
        keys_BS = documents_BS[:, keys_S.to(device)]
        same_BSS = queries_BS[:, :, None] == keys_BS[:, None, :]
        return (same_BSS if all_past else same_BSS & past_SS)[:, None]

    def attend(self, q_BHSC, k_BHSC, v_BHSC, mask: Tensor | None, scale: float) -> Tensor:  # type: ignore[no-untyped-def]
        grouped = q_BHSC.shape[1] != k_BHSC.shape[1]
        return F.scaled_dot_product_attention(
            q_BHSC, k_BHSC, v_BHSC, attn_mask=mask, scale=scale, enable_gqa=grouped
        )

    def forward(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC, v_BHSC, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        wide = accumulation_type(q_BHSC.dtype)
        heads = k_BHSC.shape[1]
        scores = _scores(_grouped(q_BHSC, heads).to(wide), k_BHSC.to(wide), mask, scale)
        lse = scores.logsumexp(-1)
        # A query without keys gets 0; exp(-inf + inf), without the clamp, would be NaN.
        weights = scores.sub_(lse.clamp_min(torch.finfo(wide).min)[..., None]).exp_()
        return _ungrouped(weights @ v_BHSC.to(wide), q_BHSC), _ungrouped(lse, q_BHSC)

    def backward(  # type: ignore[no-untyped-def]
        self, upstream: Upstream, k_BHSC, v_BHSC, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = accumulation_type(k_BHSC.dtype)
        heads = k_BHSC.shape[1]
        q, grad, lse, delta = (_grouped(x, heads).to(wide) for x in upstream)
        k, v = k_BHSC.to(wide), v_BHSC.to(wide)
        weights = _scores(q, k, mask, scale).sub_(lse[..., None]).exp_()
        grad_v = weights.mT @ grad
        grad_scores = (grad @ v.mT).sub_(delta[..., None]).mul_(weights).mul_(scale)
        grad_q = _ungrouped(grad_scores @ k, upstream.q_BHSC)
        return grad_q, grad_scores.mT @ q, grad_v


class FlexBlocks:
    """Flex attention, which skips tiles that are masked out: one block of one size in every step.

    Its making of a mask holds [B, queries, keys] bools for a moment.
    """

    def __init__(self, *, mask_documents: bool, compiled: bool) -> None:
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

        self._mask_documents = mask_documents
        self._attend: Any = torch.compile(flex_attention) if compiled else flex_attention
        self._create = create_block_mask
        self._with_lse = AuxRequest(lse=True)

    def blocks(self, documents_BS: Tensor, queries_S: Tensor, keys_S: Tensor) -> list[Block]:
        if keys_S[0] > queries_S[-1]:
            return []
        batch, device = len(documents_BS), documents_BS.device
        query_at, key_at = queries_S.to(device), keys_S.to(device)
        query_documents, key_documents = documents_BS[:, query_at], documents_BS[:, key_at]

        def past(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return query_at[query] >= key_at[key]

        def same_document(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            same = query_documents[b, query] == key_documents[b, key]
            return same & (query_at[query] >= key_at[key])

        mask = self._create(
            same_document if self._mask_documents else past,
            batch if self._mask_documents else None,
            None,
            len(queries_S),
            len(keys_S),
            device=device.type,
        )
        return [Block(slice(None), slice(None), mask)]

    def attend(self, q_BHSC, k_BHSC, v_BHSC, mask: Any, scale: float) -> Tensor:  # type: ignore[no-untyped-def]
        grouped = q_BHSC.shape[1] != k_BHSC.shape[1]
        return self._attend(
            q_BHSC, k_BHSC, v_BHSC, block_mask=mask, scale=scale, enable_gqa=grouped
        )

    def forward(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC, v_BHSC, mask: Any, scale: float
    ) -> tuple[Tensor, Tensor]:
        grouped = q_BHSC.shape[1] != k_BHSC.shape[1]
        o_BHSC, more = self._attend(
            q_BHSC,
            k_BHSC,
            v_BHSC,
            block_mask=mask,
            scale=scale,
            enable_gqa=grouped,
            return_aux=self._with_lse,
        )
        return o_BHSC, more.lse

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


def choose_blocks(*, mask_documents: bool, device_type: str) -> BlockAttention:
    """The device's way."""
    if device_type == "cuda":
        return FlexBlocks(mask_documents=mask_documents, compiled=True)
    return ExplicitBlocks(mask_documents=mask_documents)


def accumulation_type(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over blocks are kept in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _scores(q: Tensor, k_BHSC: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Of grouped queries: [B, kv heads, group * queries, keys]."""
    scores = (q @ k_BHSC.mT).mul_(scale)
    if mask is not None:
        scores.unflatten(2, (-1, mask.shape[2])).masked_fill_(~mask[:, :, None], float("-inf"))
    return scores


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """[B, H, S, ...] -> [B, kv heads, group * S, ...]: one product serves a group of heads."""
    return x.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)


def _ungrouped(x: Tensor, like_BHSC: Tensor) -> Tensor:
    batch, heads, seq_len, _ = like_BHSC.shape
    return x.reshape(batch, heads, seq_len, *x.shape[3:])
