"""Expert parallelism: the experts are cut over (ep, etp), and tokens travel to them.

Each rank of an `ep` group holds a block of the experts; each rank of an `etp` group holds a slice
of those experts' hidden dim. On entry every rank of a (dp_shard x cp x tp) block holds tokens of
its own, so nothing here needs to know how the dense part of the model was cut.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.distributed.collectives import (
    all_gather_rows,
    all_to_all_rows,
    gather_parts,
    reduce_scatter_rows,
)
from titan_moe.distributed.local import cut_parameter, local_part
from titan_moe.distributed.meshes import Meshes
from titan_moe.moe.dispatch import ExpertRows, SortedTokens, pad_to_alignment
from titan_moe.moe.experts import Compute, Experts, ExpertWeights
from titan_moe.moe.layer import MoE
from titan_moe.moe.permute import combine_rows, gather_rows

# The dim that etp cuts of each stack: the hidden dim F. Of b2 [E, D], which is added to a sum over
# F that the ranks share, it is D: each rank adds it to a slice.
_CUT_BY_ETP = {"w1": 1, "w2": 2, "w3": 1, "b1": 1, "b2": 1, "b3": 1}


class AllToAllPlan(NamedTuple):
    """Where rows go: to their expert's ranks, then into padded expert-major order there."""

    tokens: SortedTokens
    sent: list[int]
    """Rows for each rank of the ep group."""
    received: list[int]
    gathered: list[int]
    """Rows that each rank of the etp group received."""
    source_R: Tensor
    """The gathered row of each padded row, -1 for padding."""
    position_N1: Tensor
    """The padded row of each gathered row."""
    offsets_E: Tensor


class AllToAllDispatcher:
    """Rows and their routing weights: all-to-all over ep, then all-gather over etp; and back.

    Args:
        ep_group: the ranks that hold the other experts.
        etp_group: the ranks that hold the other slices of the same experts.
        num_local: experts per rank.
        row_alignment: each expert's rows are padded to a multiple of this.
    """

    def __init__(
        self, ep_group: ProcessGroup, etp_group: ProcessGroup, *, num_local: int, row_alignment: int
    ) -> None:
        self.ep_group = ep_group
        self.etp_group = etp_group
        self.num_local = num_local
        self.row_alignment = row_alignment

    def traffic(self, tokens: SortedTokens) -> Tensor:
        """As the protocol says, for the whole way to the experts, gathering over etp included.

        All etp ranks that hold an expert's slices want its tokens' rows. A row of an expert
        elsewhere crosses the wire once over ep and etp - 1 times over etp; a row of an own expert,
        the latter only. A destination rank that a token reaches for several experts counts for as
        many rows, and for one pair.
        """
        sent_P = tokens.counts_E.view(-1, self.num_local).sum(1)
        destination_TK = torch.searchsorted(sent_P.cumsum(0), tokens.rows_TK, right=True)
        reached_TP = destination_TK.new_zeros(len(destination_TK), len(sent_P), dtype=torch.bool)
        reached_TP.scatter_(1, destination_TK, True)
        rows_2P = torch.stack([sent_P, reached_TP.sum(0)])
        return self.etp_group.size() * rows_2P.sum(1) - rows_2P[:, self.ep_group.rank()]

    def plan(self, tokens: SortedTokens) -> AllToAllPlan:
        sent_PE = tokens.counts_E.view(-1, self.num_local)
        received_PE = torch.empty_like(sent_PE)
        dist.all_to_all_single(received_PE, sent_PE, group=self.ep_group)
        gathered_PE = received_PE
        if (slices := self.etp_group.size()) > 1:
            gathered_PE = gather_parts(received_PE, self.etp_group).flatten(0, 1)
        gathered_P = gathered_PE.view(slices, -1).sum(1)
        # Host sync, once per layer: collectives of rows want their sizes as Python ints.
        sizes = torch.cat([sent_PE.sum(1), received_PE.sum(1), gathered_P]).tolist()
        degree = len(sent_PE)
        gathered = sizes[2 * degree :]
        permuted = pad_to_alignment(gathered_PE, sum(gathered), self.row_alignment)
        return AllToAllPlan(
            tokens=tokens,
            sent=sizes[:degree],
            received=sizes[degree : 2 * degree],
            gathered=gathered,
            source_R=permuted.source_R,
            position_N1=permuted.position_R[:, None],
            offsets_E=permuted.offsets_E,
        )

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: AllToAllPlan) -> ExpertRows:
        tokens = plan.tokens
        x_ND = gather_rows(x_TD, tokens.token_N, tokens.rows_TK)
        weights_N1 = gather_rows(
            weights_TK.reshape(-1, 1), tokens.slot_N, tokens.rows_TK.view(-1, 1)
        )
        return ExpertRows(
            x_RD=self._send(x_ND, plan),
            weights_R=self._send(weights_N1, plan)[:, 0],
            offsets_E=plan.offsets_E,
        )

    def combine(self, y_RD: Tensor, plan: AllToAllPlan) -> Tensor:
        y_ND = combine_rows(y_RD, plan.position_N1, plan.source_R)
        if len(plan.gathered) > 1:
            y_ND = reduce_scatter_rows(y_ND, plan.gathered, self.etp_group)
        y_ND = all_to_all_rows(y_ND, plan.received, plan.sent, self.ep_group)
        return combine_rows(y_ND, plan.tokens.rows_TK, plan.tokens.token_N)

    def _send(self, x_ND: Tensor, plan: AllToAllPlan) -> Tensor:
        x_ND = all_to_all_rows(x_ND, plan.sent, plan.received, self.ep_group)
        if len(plan.gathered) > 1:
            x_ND = all_gather_rows(x_ND, plan.gathered, self.etp_group)
        return gather_rows(x_ND, plan.source_R, plan.position_N1)


def join_sequences(moe_layers: list[MoE], meshes: Meshes) -> None:
    """Let losses over sequences see whole ones, where cp and tp cut them."""
    group = meshes.group("sequence")
    if group.size() == 1:
        return

    def whole_sequences(counts_BE: Tensor) -> Tensor:
        dist.all_reduce(counts_BE, group=group)
        return counts_BE

    for moe in moe_layers:
        moe.whole_sequences = whole_sequences


def apply_expert_parallel(moe_layers: list[MoE], meshes: Meshes) -> None:
    """Cut the layers' experts over (ep, etp) and let their tokens travel. No-op at degree 1."""
    dims = meshes.dims
    if dims.ep * dims.etp == 1:
        return
    for moe in moe_layers:
        _cut_experts(moe.experts, meshes)
        moe.dispatcher = AllToAllDispatcher(
            meshes.group("ep"),
            meshes.group("etp"),
            num_local=moe.config.num_experts // dims.ep,
            row_alignment=moe.config.row_alignment,
        )


def _cut_experts(experts: Experts, meshes: Meshes) -> None:
    """Replace stacked weights, on the meta device, by DTensors of this rank's experts and slice."""
    axes = tuple(axis for axis in ("ep", "etp") if meshes.dims.size(axis) > 1)
    for name, _ in list(experts.named_parameters(recurse=False)):
        dims = {"ep": 0, "etp": _CUT_BY_ETP[name]}
        cut_parameter(experts, name, meshes.sparse[axes], [dims[axis] for axis in axes])
    experts.compute = on_local_shards(experts.compute, meshes.group("etp"))


def on_local_shards(compute: Compute, etp_group: ProcessGroup) -> Compute:
    """Hand `compute` each weight's local shard instead of the DTensor; b2 with zeros for the slices
    of D that other ranks add."""
    place, slices = etp_group.rank(), etp_group.size()

    def compute_locally(rows: ExpertRows, weights: ExpertWeights) -> Tensor:
        own = ExpertWeights(*(None if w is None else local_part(w) for w in weights))  # type: ignore[arg-type]
        if own.b2 is not None and slices > 1:
            width = own.b2.shape[1]
            around = (place * width, (slices - 1 - place) * width)
            own = own._replace(b2=F.pad(own.b2, around))
        return compute(rows, own)

    return compute_locally
