"""softmax(q k^T) v over the past: a row's, a document's, a window's or a chunk's; with sinks.

A core makes its masks once per microbatch, for all layers, and is chosen when the model is built.
"""

from typing import Any

import torch
from torch import Tensor

from titan_moe.ops.attention import AttentionCore, Flex, first_seen_in_rows, is_seen, sdpa
from titan_moe.ops.cpu.blockwise import MAX_SEQ_LEN, attend_in_blocks
from titan_moe.ops.local_attention import LocalAttention


class CausalSdpa:
    """Documents packed into a row see each other. Fast where neither windows nor sinks are."""

    def mask(self, documents_BS: Tensor, local: LocalAttention | None = None) -> Tensor | None:
        return None if local is None else _explicit(documents_BS, local, mask_documents=False)

    def __call__(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC, v_BHSC, mask: Tensor | None, scale: float, sinks_H=None
    ) -> Tensor:
        if mask is None and sinks_H is not None:
            square = q_BHSC.shape[2], k_BHSC.shape[2]
            mask = torch.ones(square, dtype=torch.bool, device=q_BHSC.device).tril_()
        return _attend(q_BHSC, k_BHSC, v_BHSC, mask, scale, sinks_H)


class DocumentSdpa:
    """Causal within each document by an explicit mask [B, 1, S, S]: the CPU's way."""

    def mask(self, documents_BS: Tensor, local: LocalAttention | None = None) -> Tensor:
        return _explicit(documents_BS, local, mask_documents=True)

    def __call__(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC, v_BHSC, mask: Tensor, scale: float, sinks_H=None
    ) -> Tensor:
        return _attend(q_BHSC, k_BHSC, v_BHSC, mask, scale, sinks_H)


class AllPairs:
    """By an explicit mask and torch's own kernel over all pairs: the oracle of the others."""

    def __init__(self, *, mask_documents: bool) -> None:
        self._mask_documents = mask_documents

    def mask(self, documents_BS: Tensor, local: LocalAttention | None = None) -> Tensor:
        return _explicit(documents_BS, local, mask_documents=self._mask_documents)

    def __call__(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC, v_BHSC, mask: Tensor, scale: float, sinks_H=None
    ) -> Tensor:
        return sdpa(q_BHSC, k_BHSC, v_BHSC, mask, scale, sinks_H)


def _attend(  # type: ignore[no-untyped-def]
    q_BHSC, k_BHSC, v_BHSC, mask: Tensor | None, scale: float, sinks_H
) -> Tensor:
    """Whole rows in causal order; the mask is None where that is all there is to it."""
    if q_BHSC.is_cpu and sinks_H is None and q_BHSC.shape[2] <= MAX_SEQ_LEN:
        return attend_in_blocks(q_BHSC, k_BHSC, v_BHSC, mask, scale)
    return sdpa(q_BHSC, k_BHSC, v_BHSC, mask, scale, sinks_H, is_causal=mask is None)


def _explicit(
    documents_BS: Tensor, local: LocalAttention | None, *, mask_documents: bool
) -> Tensor:
    first_BS = first_seen_in_rows(documents_BS, local, mask_documents=mask_documents)
    positions_S = torch.arange(first_BS.shape[1], device=first_BS.device)
    return is_seen(positions_S, positions_S, first_BS)[:, None]


class FlexCore:
    """By flex attention, which skips tiles that are masked out."""

    def __init__(self, *, mask_documents: bool, compiled: bool) -> None:
        self._mask_documents = mask_documents
        self._flex = Flex(compiled=compiled)

    def mask(self, documents_BS: Tensor, local: LocalAttention | None = None) -> Any:
        return self._flex.row_mask(
            first_seen_in_rows(documents_BS, local, mask_documents=self._mask_documents)
        )

    def __call__(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC, v_BHSC, mask: Any, scale: float, sinks_H=None
    ) -> Tensor:
        return self._flex.attend(q_BHSC, k_BHSC, v_BHSC, mask, scale, sinks_H)


def choose_core(
    *, mask_documents: bool, device_type: str, local_or_sinks: bool = False
) -> AttentionCore:
    """The fastest core for the device: on CUDA a mask never costs the fast kernel.

    Args:
        local_or_sinks: whether any layer has a window, a chunk or sinks.
    """
    if device_type == "cuda" and (mask_documents or local_or_sinks):
        return FlexCore(mask_documents=mask_documents, compiled=True)
    return DocumentSdpa() if mask_documents else CausalSdpa()
