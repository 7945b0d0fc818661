"""Keeps keys, values and recurrent states of a text so far: a further token costs itself alone.

An attention layer keeps its keys and values, also in latent attention those of all heads, and its
indexer's keys. A recurrent layer keeps its state and the tokens that its convolutions look back to.
Windows and chunks keep the past that they no longer see.
"""

from collections import deque
from copy import deepcopy
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from titan_moe.models.decoder import Decoder
from titan_moe.ops.attention import first_seen, is_seen, sdpa
from titan_moe.ops.gated_delta import DeltaRule, Recurrence
from titan_moe.ops.local_attention import LocalAttention
from titan_moe.ops.recomputed import short_convolution
from titan_moe.ops.sparse_attention import Index, Keys, SparseAttention


class KeptKeys:
    """An AttentionCore of layers that take turns: the tokens of a layer's call follow those of its
    calls before."""

    def __init__(self, num_layers: int) -> None:
        self._layers = cycle([dict[str, Tensor]() for _ in range(num_layers)])
        self._sparse = SparseAttention(mask_documents=False)

    def mask(self, documents_BS: Tensor, local=None, bounds=None) -> LocalAttention | None:  # type: ignore[no-untyped-def]
        return local

    def __call__(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC, v_BHSC, mask, scale, sinks_H=None, index: Keys | None = None
    ) -> Tensor:
        joined = partial(_joined, next(self._layers))
        k_BHTC, v_BHTC = joined("k", k_BHSC), joined("v", v_BHSC)
        keys_T = torch.arange(k_BHTC.shape[2], device=k_BHTC.device)
        queries_S = keys_T[-q_BHSC.shape[2] :]
        seen_1ST = is_seen(queries_S, keys_T, first_seen(queries_S, mask)[None])
        if index is None:
            return sdpa(q_BHSC, k_BHTC, v_BHTC, seen_1ST[:, None], scale, sinks_H)
        if isinstance(index, Index):
            index = index._replace(k_BSC=joined("index", index.k_BSC[:, None])[:, 0])
        return self._sparse(q_BHSC, k_BHTC, v_BHTC, seen_1ST, scale, None, index)


def _joined(kept: dict[str, Tensor], name: str, new_BHSC: Tensor) -> Tensor:
    kept[name] = torch.cat([kept.get(name, new_BHSC[:, :, :0]), new_BHSC], 2)
    return kept[name]


class KeptState:
    """The recurrence of layers that take turns: the tokens of a layer's call follow those of its
    calls before."""

    def __init__(self, rule: DeltaRule, num_layers: int) -> None:
        self._rule = rule
        self._before: dict[int, Tensor] = {}
        self._states: deque[Tensor | None] = deque([None] * num_layers)
        self._length = 0

    def mask(self, documents_BS: Tensor) -> Tensor:
        place_S = torch.arange(documents_BS.shape[1], device=documents_BS.device) + self._length
        self._length += len(place_S)
        return place_S[None]

    def convolve(  # type: ignore[no-untyped-def]
        self, x_BSC: Tensor, weight_C1W: Tensor, place_BS: Tensor, bias_C=None
    ) -> Tensor:
        key = id(weight_C1W)  # A layer has a convolution for queries, one for keys, one for values.
        if key not in self._before:
            back = weight_C1W.shape[-1] - 1
            self._before[key] = x_BSC.new_zeros(len(x_BSC), back, x_BSC.shape[2])
        before = self._before[key]
        self._before[key] = torch.cat([before, x_BSC], 1)[:, x_BSC.shape[1] :]
        return short_convolution(x_BSC, weight_C1W, place_BS, before, bias_C)

    def __call__(  # type: ignore[no-untyped-def]
        self, q_BGSK, k_BGSK, v_BHSV, place_BS: Tensor, decay_BHS, beta_BHS, erases: bool = True
    ) -> Tensor:
        tensors = q_BGSK, k_BGSK, v_BHSV, decay_BHS, beta_BHS
        q, k, v, decay, beta = (x.transpose(1, 2) for x in tensors)
        before_BHKV = self._states.popleft()
        rows = q, k, v, decay, beta, place_BS
        o_BSHV, after_BHKV = self._rule(*rows, before_BHKV, erases=erases)
        self._states.append(after_BHKV)
        return o_BSHV.transpose(1, 2)


def with_cache(model: Decoder) -> Decoder:
    """Returns a decoder of the same tensors, whose calls go on with one text: each call's tokens
    follow those of the calls before, and their positions are to be given.

    For evaluation, in one process, of one batch of texts without padding.
    """
    instead: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    kinds: list[Any] = [layer.sees for layer in model.layers.values()]
    recurrent = kinds.count("state")
    instead[id(model.core)] = KeptKeys(len(kinds) - recurrent - kinds.count("nothing"))
    if recurrent:
        cut = "a recurrence of sequences that are cut keeps no state"
        assert type(model.recurrence) is Recurrence, cut
        instead[id(model.recurrence)] = KeptState(model.recurrence.rule, recurrent)
    return deepcopy(model, instead)
