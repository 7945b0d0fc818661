"""Context parallelism: `cp` cuts the tokens of each sequence, attention joins them.

Everything but attention works on its own tokens. Attention has one of three cores:

    allgather   each rank gathers all keys and values: memory for whole sequences of them.
    ulysses     each rank gets all tokens of its share of the heads (arXiv 2309.14509) and runs the
                plain kernel. Heads and kv heads must divide by cp. Fewer bytes than the others
                where cp is more than 1 + heads / kv heads.
    ring        keys and values travel (`ring.py`): never a whole sequence in memory.

Head-tail balance: of 2 * cp chunks, rank r holds chunks r and 2 * cp - 1 - r, which together see as
much of the past on every rank. Either way a rank's positions ascend.
"""

from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.comm.collectives import AllToAll, exchange_rows, gather_summed
from titan_moe.distributed.context_parallel.blocks import (
    Block,
    BlockAttention,
    ExplicitBlocks,
    FlexBlocks,
)
from titan_moe.distributed.context_parallel.ring import Ring, RingFunction
from titan_moe.ops.attention import AttentionCore, first_seen_in_sequences


class Positions(Protocol):
    """Returns the positions of this rank's tokens in a sequence of `seq_len` tokens."""

    def __call__(self, seq_len: int, *, device: torch.device | None = None) -> Tensor:
        """Returns the positions, made once for each length and device; None: the CPU."""


def local_positions(
    seq_len: int,
    cp_size: int,
    cp_rank: int,
    *,
    balanced: bool,
    device: torch.device | None = None,
) -> Tensor:
    """Returns the positions of a rank's tokens in a sequence: [seq_len / cp_size] int64, ascending.

    `seq_len` divides by `cp_size`, by twice that if balanced.
    """
    held = chunks_of_ranks(cp_size, balanced)
    chunks = torch.arange(seq_len, device=device).chunk(cp_size * len(held[0]))
    return torch.cat([chunks[chunk] for chunk in held[cp_rank]])


def context_parallel_core(
    plain: AttentionCore,
    *,
    group: ProcessGroup,
    method: str,
    balanced: bool,
    mask_documents: bool,
    takes_flex: bool,
) -> AttentionCore:
    """Returns the core for attention layers whose tokens are cut over `group`.

    Its `mask` takes the documents of whole sequences [B, S], the same on all of the group. Its
    calls take this rank's tokens, at `local_positions(S, cp, rank, balanced=balanced)`, and the
    sinks of all heads. They are collective: every rank makes them in the same order. Gradients are
    plain sums over all queries. A sink's gradient is this rank's term, to be summed over the group
    like that of a weight. S may change from one microbatch to the next.

    Args:
        plain: the one-device core for the same documents; what "ulysses" runs, on whole sequences.
        group: the ranks of `cp`, two or more.
        method: "allgather", "ulysses" or "ring".
        balanced: head-tail balance; else consecutive positions.
        mask_documents: whether documents packed into a sequence are kept apart.
        takes_flex: whether the device has compiled flex attention for the heads and their type;
            else masks are explicit.
    """
    if method == "ulysses":
        return Ulysses(plain, group, balanced=balanced)
    attention = FlexBlocks(compiled=True) if takes_flex else ExplicitBlocks()
    how = {"balanced": balanced, "mask_documents": mask_documents}
    if method == "allgather":
        return AllGather(attention, group, **how)
    assert method == "ring"
    return RingAttention(attention, group, **how)


class _OwnQueries:
    """A base of cores whose queries stay on their ranks."""

    def __init__(
        self,
        attention: BlockAttention,
        group: ProcessGroup,
        *,
        balanced: bool,
        mask_documents: bool,
    ) -> None:
        self._attention, self._group, self._balanced = attention, group, balanced
        self._positions = cache(partial(local_positions, balanced=balanced))
        self._first = partial(first_seen_in_sequences, mask_documents=mask_documents)


class AllGather(_OwnQueries):
    """Local queries attend to the keys and values of whole sequences."""

    def mask(self, documents_BS: Tensor, local=None, bounds=None) -> list[Block]:  # type: ignore[no-untyped-def]
        seq_len, size, rank = documents_BS.shape[1], self._group.size(), self._group.rank()
        queries_S = self._positions(seq_len, size, rank, device=documents_BS.device)
        keys_S = self._positions(seq_len, 1, 0, device=documents_BS.device)
        return self._attention.blocks(self._first(documents_BS, local), queries_S, keys_S)

    @torch.compiler.disable
    def __call__(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC, v_BHSC, mask: list[Block], scale: float, sinks_H=None
    ) -> Tensor:
        whole_BHSE = whole_sequence(
            torch.cat([k_BHSC, v_BHSC], -1), self._group, balanced=self._balanced
        )
        k, v = whole_BHSE.split([k_BHSC.shape[-1], v_BHSC.shape[-1]], -1)
        parts = [
            self._attention.attend(
                q_BHSC[:, :, queries], k[:, :, keys], v[:, :, keys], block_mask, scale, sinks_H
            )
            for queries, keys, block_mask in mask
        ]
        return torch.cat(parts, 2)


class Ulysses:
    """Attention of whole sequences for a share of the heads, between two all-to-alls."""

    def __init__(self, plain: AttentionCore, group: ProcessGroup, *, balanced: bool) -> None:
        self._plain, self._group, self._balanced = plain, group, balanced

    def mask(self, documents_BS: Tensor, local=None, bounds=None) -> Any:  # type: ignore[no-untyped-def]
        return self._plain.mask(documents_BS, local, bounds)

    @torch.compiler.disable
    def __call__(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC, v_BHSC, mask: Any, scale: float, sinks_H=None
    ) -> Tensor:
        if sinks_H is not None:
            sinks_H = sinks_H.chunk(self._group.size())[self._group.rank()]
        q, k, v = self._share_heads(q_BHSC, k_BHSC, v_BHSC)
        return self._share_tokens(self._plain(q, k, v, mask, scale, sinks_H))

    def _share_heads(self, *tensors_BHSC: Tensor) -> list[Tensor]:
        """Turns all heads of own tokens into own heads of all tokens, with one exchange."""
        size = self._group.size()
        by_rank = [x.unflatten(1, (size, -1)).movedim(1, 0) for x in tensors_BHSC]
        sent = torch.cat([x.flatten(1) for x in by_rank], 1)
        received = self._exchange(sent).split([x[0].numel() for x in by_rank], 1)
        parts = [got.view(x.shape) for got, x in zip(received, by_rank, strict=True)]
        return [join_sequence(x, balanced=self._balanced) for x in parts]

    def _share_tokens(self, o_BHSC: Tensor) -> Tensor:
        """Turns own heads of all tokens into all heads of own tokens."""
        parts = cut_sequence(o_BHSC, self._group.size(), balanced=self._balanced)
        return self._exchange(parts).movedim(0, 1).flatten(1, 2)

    def _exchange(self, x: Tensor) -> Tensor:
        return exchange_rows(x, AllToAll.of_table(self._group))


class RingAttention(_OwnQueries):
    """Local queries attend to keys and values that travel around the ring."""

    def mask(self, documents_BS: Tensor, local=None, bounds=None) -> list[list[Block]]:  # type: ignore[no-untyped-def]
        seq_len, size, rank = documents_BS.shape[1], self._group.size(), self._group.rank()
        positions = partial(self._positions, seq_len, size, device=documents_BS.device)
        sources = [positions((rank - distance) % size) for distance in range(size)]
        first_BS, queries_S = self._first(documents_BS, local), positions(rank)
        return [self._attention.blocks(first_BS, queries_S, source) for source in sources]

    @torch.compiler.disable
    def __call__(  # type: ignore[no-untyped-def]
        self, q_BHSC, k_BHSC, v_BHSC, mask: list[list[Block]], scale: float, sinks_H=None
    ) -> Tensor:
        ring = Ring(self._group, self._attention, mask, scale)
        return RingFunction.apply(q_BHSC, k_BHSC, v_BHSC, sinks_H, ring)


def whole_sequence(own_BHSE: Tensor, group: ProcessGroup, *, balanced: bool) -> Tensor:
    """Returns whole sequences, gathered from all ranks' tokens. Backward: all ranks' gradients,
    summed in rank order."""
    return join_sequence(gather_summed(own_BHSE, group), balanced=balanced)


def join_sequence(parts_PBHSE: Tensor, *, balanced: bool) -> Tensor:
    """Joins the ranks' parts [cp, B, H, S/cp, E] to whole sequences [B, H, S, E]."""
    held = chunks_of_ranks(len(parts_PBHSE), balanced)
    chunks = {
        chunk: x
        for part, numbers in zip(parts_PBHSE.unbind(), held, strict=True)
        for chunk, x in zip(numbers, part.chunk(len(numbers), 2), strict=True)
    }
    return torch.cat([chunks[chunk] for chunk in range(len(chunks))], 2)


def cut_sequence(x_BHSE: Tensor, cp_size: int, *, balanced: bool) -> Tensor:
    """The inverse of `join_sequence`."""
    held = chunks_of_ranks(cp_size, balanced)
    chunks = x_BHSE.chunk(cp_size * len(held[0]), 2)
    return torch.stack([torch.cat([chunks[chunk] for chunk in numbers], 2) for numbers in held])


def chunks_of_ranks(cp_size: int, balanced: bool) -> list[list[int]]:
    """Returns the numbers of a sequence's chunks that each rank holds."""
    if not balanced:
        return [[rank] for rank in range(cp_size)]
    return [[rank, 2 * cp_size - 1 - rank] for rank in range(cp_size)]
