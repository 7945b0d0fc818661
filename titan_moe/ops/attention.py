"""Softmax attention where each query sees an interval of keys, and may have a sink.

Causal order, packed documents, windows and chunks all say the same kind of thing: a query sees the
keys from some first position up to its own. So a mask is that first position for every query; it
ascends along a sequence, so the edges of a block say whether any query sees it.

A core (`AttentionCore`) makes its masks once per microbatch, for all layers, and is chosen when the
model is built. Its calls may be closed to torch.compile's graphs.

A sink is one more logit in a head's softmax that brings no value: it takes a share of the weights
away (attention sinks: arXiv 2309.17453; a learned one: gpt-oss).
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.ops.blockwise_attention import MAX_SEQ_LEN, attend_in_blocks
from titan_moe.ops.flex_attention import Flex
from titan_moe.ops.local_attention import LocalAttention
from titan_moe.ops.operation import at_least_float32
from titan_moe.ops.varlen_attention import (
    DocumentBounds,
    Pieces,
    bounds_of,
    pieces_of_sequences,
    varlen_attention,
)

LOAD_BYTES = 16
"""Fused kernels load this many bytes at once, so each head's row begins at a multiple of it."""


class AttentionCore(Protocol):
    """Builds masks and attends, between an attention layer's projections."""

    def mask(
        self,
        documents_BS: Tensor,
        local: LocalAttention | None = None,
        bounds: DocumentBounds | None = None,
    ) -> Any:
        """The mask of a microbatch for layers that see as far as `local`; None: the whole past.

        `documents_BS` numbers each sequence's packed documents from 0. Chunks are counted in the
        sequence, or in the document where a core keeps documents apart.
        A core that wants `bounds` of them waits for the device where there are none.
        """

    def __call__(
        self,
        q_BHSC: Tensor,
        k_BHSC: Tensor,
        v_BHSC: Tensor,
        mask: Any,
        scale: float,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attend; keys and values may have fewer heads than queries. Returns o_BHSC.

        Args:
            sinks_H: a logit per query head that joins each of its softmaxes and brings no value.
        """


def first_seen(positions_S: Tensor, local: LocalAttention | None) -> Tensor:
    """The first position that a query at each of these sees; None: all of the past. Any shape."""
    if local is None:
        return torch.zeros_like(positions_S)
    if local.kind == "window":
        return (positions_S - (local.size - 1)).clamp_min(0)
    assert local.kind == "chunk"
    return positions_S - positions_S % local.size


def first_seen_in_sequences(
    documents_BS: Tensor, local: LocalAttention | None, *, mask_documents: bool
) -> Tensor:
    """`first_seen` of whole sequences: [B, S], or [1, S] where all sequences' are the same.

    Args:
        documents_BS: numbers each sequence's packed documents; one run of tokens has one number.
        mask_documents: whether a query sees its own document only.
    """
    positions_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    if not mask_documents:
        return first_seen(positions_S, local)[None]
    starts_BS = document_starts(documents_BS)
    return starts_BS + first_seen(positions_S - starts_BS, local)


def document_starts(documents_BS: Tensor) -> Tensor:
    """Returns where each token's document begins in its sequence: [B, S]."""
    positions_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    opens_BS = documents_BS.diff(dim=1, prepend=documents_BS[:, :1]) != 0
    return (positions_S * opens_BS).cummax(1).values


def is_seen(queries_S: Tensor, keys_S: Tensor, first_BS: Tensor) -> Tensor:
    """Returns whether each query sees each key: [B, queries, keys] bool.

    Args:
        queries_S, keys_S: their positions in the sequence.
        first_BS: the first position that each of the queries sees.
    """
    return (first_BS[:, :, None] <= keys_S) & (keys_S <= queries_S[:, None])


def sdpa(
    q_BHSC: Tensor,
    k_BHSC: Tensor,
    v_BHSC: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks_H: Tensor | None = None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """torch's fused attention. Keys and values may have fewer heads than queries.

    On a CPU narrow types are computed in float32, and kept so for the backward: torch's kernel adds
    the gradients of keys and values, block of queries after block, in their own type.

    Args:
        mask: which keys a query sees, broadcast to [B, H, queries, keys]; None: all.
        sinks_H: a logit per query head.
        is_causal: instead of a mask, and of sinks.
    """
    v_dim, dtype = v_BHSC.shape[-1], q_BHSC.dtype
    if q_BHSC.is_cpu:
        wide = at_least_float32(q_BHSC)
        q_BHSC, k_BHSC, v_BHSC = q_BHSC.to(wide), k_BHSC.to(wide), v_BHSC.to(wide)
    if sinks_H is not None:
        assert not is_causal
        q_BHSC, k_BHSC, v_BHSC, mask = _with_sink_key(q_BHSC, k_BHSC, v_BHSC, mask, sinks_H / scale)
    o_BHSC = F.scaled_dot_product_attention(
        q_BHSC,
        k_BHSC,
        v_BHSC,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q_BHSC.shape[1] != k_BHSC.shape[1],
    )
    return o_BHSC[..., :v_dim].to(dtype)


def _with_sink_key(
    q_BHSC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, mask: Tensor | None, sinks_H: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Adds a key for the sinks, which alone is not zero in a further channel of all keys; queries
    have their head's logit there.

    So any kernel computes sinks and their gradients. Values get a channel too, since fused kernels
    want as many as keys have.
    """
    sinks_1H11 = sinks_H.to(q_BHSC.dtype)[None, :, None, None]
    q_BHSC = torch.cat([q_BHSC, sinks_1H11.expand(*q_BHSC.shape[:-1], 1)], -1)
    sink_key = F.pad(torch.zeros_like(k_BHSC[:, :, :1]), (0, 1), value=1.0)
    k_BHSC = torch.cat([sink_key, F.pad(k_BHSC, (0, 1))], 2)
    if mask is not None:
        mask = F.pad(mask, (1, 0), value=True)
    return q_BHSC, k_BHSC, F.pad(v_BHSC, (0, 1, 1, 0)), mask


MakeMask = Callable[[Tensor, LocalAttention | None], Any]


def once_by_length(make: MakeMask) -> MakeMask:
    """Returns a function that makes masks, which do not depend on the documents, once for each
    length and device."""
    made = cache(lambda length, device, local: make(torch.empty(1, length, device=device), local))
    return lambda documents_BS, local: made(documents_BS.shape[1], documents_BS.device, local)


class Sdpa:
    """Runs torch's attention over whole sequences: any device, any heads, any type. Documents,
    windows and sinks take an explicit mask [B, 1, S, S]. The CPU uses this core, and so do heads
    that the other cores' kernels refuse."""

    def __init__(self, *, mask_documents: bool = False) -> None:
        self._mask_documents = mask_documents
        self._masks = once_by_length(partial(explicit_mask, mask_documents=False))

    def mask(self, documents_BS: Tensor, local=None, bounds=None) -> Tensor | None:  # type: ignore[no-untyped-def]
        if self._mask_documents:
            return explicit_mask(documents_BS, local, mask_documents=True)
        return None if local is None else self._masks(documents_BS, local)

    def __call__(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC, v_BHSC, mask: Tensor | None, scale: float, sinks_H=None
    ) -> Tensor:
        if mask is None and sinks_H is not None:
            square = q_BHSC.shape[2], k_BHSC.shape[2]
            mask = torch.ones(square, dtype=torch.bool, device=q_BHSC.device).tril_()
        if q_BHSC.is_cpu and sinks_H is None and q_BHSC.shape[2] <= MAX_SEQ_LEN:
            return attend_in_blocks(q_BHSC, k_BHSC, v_BHSC, mask, scale)
        return sdpa(q_BHSC, k_BHSC, v_BHSC, mask, scale, sinks_H, is_causal=mask is None)


def explicit_mask(
    documents_BS: Tensor, local: LocalAttention | None, *, mask_documents: bool
) -> Tensor:
    """The keys that each query sees, [B, 1, S, S] bool."""
    first_BS = first_seen_in_sequences(documents_BS, local, mask_documents=mask_documents)
    positions_S = torch.arange(first_BS.shape[1], device=first_BS.device)
    return is_seen(positions_S, positions_S, first_BS)[:, None]


class VarlenCore:
    """Flash attention over documents, chunks or sequences of any length: see varlen_attention."""

    def __init__(self, *, mask_documents: bool) -> None:
        self._mask_documents = mask_documents

    def mask(  # type: ignore[no-untyped-def]
        self, documents_BS: Tensor, local=None, bounds: DocumentBounds | None = None
    ) -> Pieces:
        if not self._mask_documents:
            documents_BS = torch.zeros_like(documents_BS)
            bounds = DocumentBounds(per_sequence=1, longest=documents_BS.shape[1])
        return pieces_of_sequences(documents_BS, local, bounds or bounds_of(documents_BS))

    def __call__(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC, v_BHSC, mask: Pieces, scale: float, sinks_H=None
    ) -> Tensor:
        assert sinks_H is None, "torch's kernel has no sinks"
        batch = q_BHSC.shape[0], q_BHSC.shape[2]
        q_THC, k_THC, v_THC = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHSC, k_BHSC, v_BHSC))
        o_THC = varlen_attention(q_THC, k_THC, v_THC, mask, scale)
        return o_THC.unflatten(0, batch).transpose(1, 2)


class FlexCore(Flex):
    """Flex attention of whole sequences."""

    def __init__(self, *, mask_documents: bool, compiled: bool) -> None:
        super().__init__(compiled=compiled)
        self._mask_documents = mask_documents
        self._masks = once_by_length(self._make)

    def mask(self, documents_BS: Tensor, local=None, bounds=None) -> Any:  # type: ignore[no-untyped-def]
        make = self._make if self._mask_documents else self._masks
        return make(documents_BS, local)

    def _make(self, documents_BS: Tensor, local: LocalAttention | None) -> Any:
        return self.sequence_mask(
            first_seen_in_sequences(documents_BS, local, mask_documents=self._mask_documents)
        )

    __call__ = torch.compiler.disable(Flex.attend)
