"""Recurrent layers whose sequences are cut over the ranks of `cp`.

No token moves: each rank computes on the segments of the sequence that it holds, one, or two where
head-tail balance deals them out for attention's sake. What a segment makes of the state before it
is an affine map, S -> N + M S, and so is what its tokens read of it. So a rank computes both at
once, with K more channels of values whose state begins as the identity; all ranks then exchange
their segments' M and N, chain those before their own, and add what that state gives.

The price is the rule on K more channels of values, and an all-gather of maps: for each sequence,
head and segment K (V + K) numbers. The convolution's is the last tokens of each segment.
"""

from functools import cache, lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.comm.collectives import gather_summed
from titan_moe.distributed.context_parallel.apply import chunks_of_ranks, local_positions
from titan_moe.ops.gated_delta import LATEST, DeltaRule, Recurrence
from titan_moe.ops.recomputed import short_convolution


class SegmentedRecurrence(Recurrence):
    """The recurrence of sequences that are cut over a group. All but `mask` is collective.

    Args:
        rule: computes the recurrence; here it gets segments in place of sequences.
        group: the ranks of `cp`, two or more.
        balanced: head-tail balance; else consecutive positions.
        mask_documents: whether documents packed into a sequence are kept apart.
    """

    def __init__(
        self, rule: DeltaRule, group: ProcessGroup, *, balanced: bool, mask_documents: bool
    ) -> None:
        super().__init__(rule, mask_documents=mask_documents)
        self._group = group
        held = chunks_of_ranks(group.size(), balanced)
        self._own = held[group.rank()]
        dealt = [segment for of_rank in held for segment in of_rank]
        self._order = [dealt.index(segment) for segment in range(len(dealt))]
        self._positions = cache(partial(local_positions, balanced=balanced))
        # The same tensor for all layers, by which rules know it again.
        self._places = lru_cache(LATEST)(lambda x_BS, batch: self._cut(x_BS.expand(batch, -1)))

    def mask(self, documents_BS: Tensor) -> Tensor:
        place_BS = super().mask(documents_BS)
        size, rank, length = self._group.size(), self._group.rank(), place_BS.shape[1]
        return place_BS[:, self._positions(length, size, rank, device=place_BS.device)]

    def convolve(  # type: ignore[no-untyped-def]
        self, x_BSC: Tensor, weight_C1W: Tensor, place_BS: Tensor, bias_C=None
    ) -> Tensor:
        x_NSC = self._cut(x_BSC)
        ends = self._of_all(x_NSC[:, x_NSC.shape[1] - weight_C1W.shape[-1] + 1 :])
        before_NWC = self._own_of(torch.cat([torch.zeros_like(ends[:1]), ends[:-1]]))
        place_NS = self._places(place_BS, len(x_BSC))
        return self._join(short_convolution(x_NSC, weight_C1W, place_NS, before_NWC, bias_C))

    @torch.compiler.disable
    def __call__(  # type: ignore[no-untyped-def]
        self, q_BGSK, k_BGSK, v_BHSV, place_BS: Tensor, decay_BHS, beta_BHS, erases: bool = True
    ) -> Tensor:
        keys, values = k_BGSK.shape[-1], v_BHSV.shape[-1]
        tensors = (q_BGSK, k_BGSK, F.pad(v_BHSV, (0, keys)), decay_BHS, beta_BHS)
        q, k, v, decay, beta = (self._cut(x.transpose(1, 2)) for x in tensors)
        place_NS = self._places(place_BS, len(v_BHSV))
        identity_KE = F.pad(
            torch.eye(keys, dtype=decay_BHS.dtype, device=q_BGSK.device), (values, 0)
        )
        shape = len(place_NS), v_BHSV.shape[1], -1, -1
        state_NHKE = identity_KE.expand(shape)
        o_NSHE, map_NHKE = self.rule(q, k, v, decay, beta, place_NS, state_NHKE, erases=erases)
        own, reads = o_NSHE.transpose(1, 2).split([values, keys], -1)
        state_NHKV = self._own_of(self._chained(self._of_all(map_NHKE), values))
        o_NHSV = own + (reads.to(state_NHKV.dtype) @ state_NHKV).to(own.dtype)
        return self._join(o_NHSV.transpose(1, 2)).transpose(1, 2)

    def _chained(self, maps_ZBHKE: Tensor, values: int) -> Tensor:
        """Returns the state before each segment of the sequence, [Z, B, H, K, V]. Each depends on
        all maps, so that every rank's backward reaches the exchange."""
        shift, factor = maps_ZBHKE.split([values, maps_ZBHKE.shape[-1] - values], -1)
        states = [torch.zeros_like(shift[0])]
        for segment in range(len(maps_ZBHKE) - 1):
            states.append(shift[segment] + factor[segment] @ states[-1])
        return torch.stack(states)

    def _cut(self, x_BS: Tensor) -> Tensor:
        """Cuts sequences [B, S, ...] into segments, [segments * B, S / segments, ...]."""
        return torch.cat(x_BS.chunk(len(self._own), 1))

    def _join(self, x_NS: Tensor) -> Tensor:
        return torch.cat(x_NS.chunk(len(self._own)), 1)

    def _of_all(self, own_N: Tensor) -> Tensor:
        """Gathers all ranks' segments [segments * B, ...] in the sequence's order, [Z, B, ...].

        Backward: all ranks' gradients, summed in rank order.
        """
        own = own_N.unflatten(0, (len(self._own), -1))
        dealt = gather_summed(own, self._group).flatten(0, 1)
        # An index made of a list would be copied to the device, and waited for.
        return torch.stack([dealt[place] for place in self._order])

    def _own_of(self, all_ZB: Tensor) -> Tensor:
        """Returns this rank's segments: the inverse of `_of_all`, without an exchange."""
        return torch.cat([all_ZB[segment] for segment in self._own])
