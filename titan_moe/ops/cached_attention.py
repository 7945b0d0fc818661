"""Attention of new tokens to all tokens of a text so far, whose keys and values are kept."""

import torch
from torch import Tensor

from titan_moe.ops.attention import first_seen, is_seen, sdpa
from titan_moe.ops.local_attention import LocalAttention


class CachedCore:
    """The `AttentionCore` of one layer while a text is generated. Has no gradient.

    Each call appends its keys and values to those of the calls before, and attends to all.
    """

    def __init__(self, local: LocalAttention | None) -> None:
        self._local = local
        self._past: tuple[Tensor, Tensor] | None = None

    def mask(self, documents_BS: Tensor, local=None, bounds=None) -> None:  # type: ignore[no-untyped-def]
        """Each layer makes its own: how many tokens came before is known there."""

    def __call__(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC: Tensor, v_BHSC: Tensor, mask: None, scale: float, sinks_H=None
    ) -> Tensor:
        if self._past is not None:
            pairs = zip(self._past, (k_BHSC, v_BHSC), strict=True)
            k_BHSC, v_BHSC = (torch.cat(pair, 2) for pair in pairs)
        self._past = k_BHSC, v_BHSC
        keys_S = torch.arange(k_BHSC.shape[2], device=k_BHSC.device)
        queries_S = keys_S[-q_BHSC.shape[2] :]
        seen = is_seen(queries_S, keys_S, first_seen(queries_S, self._local)[None])
        return sdpa(q_BHSC, k_BHSC, v_BHSC, seen[:, None], scale, sinks_H)
