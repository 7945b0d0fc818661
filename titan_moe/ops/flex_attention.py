"""torch's flex attention, which skips tiles of queries and keys where no key is seen.

Masks are those of `attention.py`: a query sees the keys from some first position up to its own.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE = 128
"""Queries and keys of a tile of flex attention, as torch has them."""
_MIN_HEAD_DIM = 16


def takes(qk_dim: int, v_dim: int, dtype: torch.dtype) -> bool:
    """Returns whether compiled flex attention takes heads of these dims in this type on CUDA.

    Triton's products want 16 channels, and its sums are float32 in any type.
    """
    return min(qk_dim, v_dim) >= _MIN_HEAD_DIM and dtype != torch.float64


def seen_tiles(queries_S: Tensor, keys_S: Tensor, first_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Returns whether any pair of a tile of queries and keys is seen, and whether all pairs are:
    both [B, tiles of queries, tiles of keys] bool.

    A query sees a run of keys whose ends ascend from query to query, so a tile's edges decide and
    nothing of the size [queries, keys] is made. A tile within which positions jump, from one chunk
    of a sequence to another, may count as seen without a pair that is, as may the last tile of
    keys: it costs time, and no result.

    Args:
        queries_S, keys_S, first_BS: as in `is_seen`; positions and first positions ascend.
    """

    def by_tile(x: Tensor, fill: int) -> Tensor:
        return F.pad(x, (0, -x.shape[-1] % _TILE), value=fill).unflatten(-1, (-1, 1, _TILE))

    # The run's ends, as numbers of keys; no key of a tile is seen by all where a query is missing.
    starts = by_tile(torch.searchsorted(keys_S, first_BS), len(keys_S))
    ends = by_tile(torch.searchsorted(keys_S, queries_S, right=True)[None], 0)
    tiles = torch.arange(0, len(keys_S), _TILE, device=keys_S.device)
    some = (starts.amin(-1) < tiles + _TILE) & (tiles < ends.amax(-1))
    return some, (starts.amax(-1) <= tiles) & (tiles + _TILE <= ends.amin(-1))


def _in_order(tiles_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of key tiles of each query tile, and the tiles' numbers, these first:
    [B, 1, Q] and [B, 1, Q, K] int32, the form that flex attention takes."""
    tiles = tiles_BQK[:, None].int()
    return tiles.sum(-1, dtype=torch.int32), tiles.argsort(stable=True, descending=True).int()


def _first_seen_by(first_BS: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the lookup of a query's first key.

    If all sequences are alike, it does not index by sequence: flex attention copies an index that
    is a Python number to the device, and waits.
    """
    if len(first_BS) > 1:
        return lambda b, query: first_BS[b, query]
    (first_S,) = first_BS
    return lambda b, query: first_S[query]


class Flex:
    """Flex attention, which skips tiles where no key is seen.

    Compiled, it is CUDA's fast kernel; torch has no backward of it on the CPU.
    """

    def __init__(self, *, compiled: bool) -> None:
        from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

        self._attend: Any = torch.compile(flex_attention) if compiled else flex_attention
        self._compiled = compiled
        self._mask_of_tiles = BlockMask.from_kv_blocks
        self._with_lse = AuxRequest(lse=True)

    def sequence_mask(self, first_BS: Tensor) -> Any:
        """Returns the mask of whole sequences, given `first_seen_in_sequences`."""
        first_seen = _first_seen_by(first_BS)

        def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (first_seen(b, query) <= key) & (key <= query)

        positions_S = torch.arange(first_BS.shape[1], device=first_BS.device)
        return self._mask(sees, positions_S, positions_S, first_BS)

    def block_mask(self, queries_S: Tensor, keys_S: Tensor, first_BS: Tensor) -> Any:
        """Returns the mask of some queries and keys of a sequence, as in `is_seen`; all on one
        device."""
        first_seen = _first_seen_by(first_BS)

        def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            key_at = keys_S[key]
            return (first_seen(b, query) <= key_at) & (key_at <= queries_S[query])

        return self._mask(sees, queries_S, keys_S, first_BS)

    def _mask(self, sees: Any, queries_S: Tensor, keys_S: Tensor, first_BS: Tensor) -> Any:
        some, every = seen_tiles(queries_S, keys_S, first_BS)
        tiles = *_in_order(some & ~every), *_in_order(every)
        return self._mask_of_tiles(*tiles, _TILE, sees, (len(queries_S), len(keys_S)))

    def attend(
        self,
        q_BHSC: Tensor,
        k_BHSC: Tensor,
        v_BHSC: Tensor,
        mask: Any,
        scale: float,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Returns the attention's output o_BHSC, differentiable."""
        if sinks_H is None:
            return self._run(q_BHSC, k_BHSC, v_BHSC, mask, scale)
        o_BHSC, lse_BHS = self.with_lse(q_BHSC, k_BHSC, v_BHSC, mask, scale)
        share_BHS = torch.sigmoid(lse_BHS - sinks_H[:, None])
        # Outside of the compiled kernel, at the price of another pass over the output.
        return (o_BHSC * share_BHS[..., None]).to(o_BHSC.dtype)

    def with_lse(
        self, q_BHSC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, mask: Any, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns o_BHSC and the natural logarithm lse_BHS of the softmax's divisor,
        differentiable.

        A query that sees no key gets 0 and -inf.
        """
        o_BHSC, more = self._run(q_BHSC, k_BHSC, v_BHSC, mask, scale, return_aux=self._with_lse)
        return o_BHSC, more.lse

    def _run(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC, v_BHSC, mask: Any, scale: float, **options: Any
    ) -> Any:
        return self._attend(
            q_BHSC,
            k_BHSC,
            v_BHSC,
            block_mask=mask,
            scale=scale,
            enable_gqa=q_BHSC.shape[1] != k_BHSC.shape[1],
            kernel_options=self._kernel_options(q_BHSC.dtype),
            **options,
        )

    def _kernel_options(self, dtype: torch.dtype) -> dict[str, Any] | None:
        if not self._compiled:
            return None
        # Not the kernel for decoding, torch's choice below 128 queries: it takes at most 128 rows
        # of the heads that share keys.
        options: dict[str, Any] = {"BACKEND": "TRITON"}
        if dtype is torch.float32:
            # With torch's 4 warps a tile of an H100 spills 10,828 bytes (heads of 128); here none.
            options["fwd_num_warps"] = 8
        return options
