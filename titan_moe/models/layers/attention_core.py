"""softmax(q k^T) v under a causal or a causal-within-document mask.

A core makes its mask once per microbatch, for all layers, and is chosen when the model is built.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class AttentionCore(Protocol):
    """What an attention layer calls between its projections."""

    def mask(self, documents_BS: Tensor) -> Any:
        """The mask of a microbatch; documents_BS numbers each row's packed documents from 0."""

    def __call__(
        self, q_BHSC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, mask: Any, scale: float
    ) -> Tensor:
        """Attend; keys and values may have fewer heads than queries. Returns o_BHSC."""


class CausalSdpa:
    """Plain causal: documents packed into a row see each other."""

    def mask(self, documents_BS: Tensor) -> None:
        return None

    def __call__(self, q_BHSC, k_BHSC, v_BHSC, mask: None, scale: float) -> Tensor:  # type: ignore[no-untyped-def]
        return F.scaled_dot_product_attention(
            q_BHSC,
            k_BHSC,
            v_BHSC,
            is_causal=True,
            scale=scale,
            enable_gqa=q_BHSC.shape[1] != k_BHSC.shape[1],
        )


class DocumentSdpa:
    """Causal within each document by an explicit mask [B, 1, S, S]: the CPU's way, the oracle."""

    def mask(self, documents_BS: Tensor) -> Tensor:
        same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
        return same_BSS.tril_()[:, None]

    def __call__(self, q_BHSC, k_BHSC, v_BHSC, mask: Tensor, scale: float) -> Tensor:  # type: ignore[no-untyped-def]
        return F.scaled_dot_product_attention(
            q_BHSC,
            k_BHSC,
            v_BHSC,
            attn_mask=mask,
            scale=scale,
            enable_gqa=q_BHSC.shape[1] != k_BHSC.shape[1],
        )


class DocumentFlex:
    """Causal within each document by flex attention, which skips blocks that are masked out."""

    def __init__(self, *, compiled: bool) -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self._attend = torch.compile(flex_attention) if compiled else flex_attention
        self._create = create_block_mask

    def mask(self, documents_BS: Tensor) -> Any:
        def same_document(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (documents_BS[b, query] == documents_BS[b, key])

        batch, seq_len = documents_BS.shape
        return self._create(
            same_document, batch, None, seq_len, seq_len, device=documents_BS.device.type
        )

    def __call__(self, q_BHSC, k_BHSC, v_BHSC, mask: Any, scale: float) -> Tensor:  # type: ignore[no-untyped-def]
        grouped = q_BHSC.shape[1] != k_BHSC.shape[1]
        return self._attend(
            q_BHSC, k_BHSC, v_BHSC, block_mask=mask, scale=scale, enable_gqa=grouped
        )


def choose_core(*, mask_documents: bool, device_type: str) -> AttentionCore:
    """The fastest core for the device: on CUDA a document mask never costs the fast kernel."""
    if not mask_documents:
        return CausalSdpa()
    return DocumentFlex(compiled=True) if device_type == "cuda" else DocumentSdpa()
