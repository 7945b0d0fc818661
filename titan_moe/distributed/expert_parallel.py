"""Expert parallelism: each rank of an ep group holds a block of the experts; tokens travel to
them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from titan_moe.distributed.collectives import all_to_all_rows
from titan_moe.distributed.meshes import Meshes
from titan_moe.moe.dispatch import ExpertRows, SortedTokens, pad_to_alignment
from titan_moe.moe.experts import Experts
from titan_moe.moe.layer import MoE
from titan_moe.moe.permute import combine_rows, gather_rows


class AllToAllPlan(NamedTuple):
    """Where rows go: to their expert's rank, then into padded expert-major order there."""

    tokens: SortedTokens
    sent: list[int]
    received: list[int]
    source_R: Tensor
    """The arrived row of each padded row, -1 for padding."""
    position_N1: Tensor
    """The padded row of each arrived row."""
    offsets_E: Tensor


class AllToAllDispatcher:
    """Rows and their routing weights over the ep group, each rank holding `num_local` experts."""

    def __init__(self, group: ProcessGroup, num_local: int, row_alignment: int) -> None:
        self.group = group
        self.num_local = num_local
        self.row_alignment = row_alignment

    def plan(self, tokens: SortedTokens) -> AllToAllPlan:
        sent_PE = tokens.counts_E.view(-1, self.num_local)
        received_PE = torch.empty_like(sent_PE)
        dist.all_to_all_single(received_PE, sent_PE, group=self.group)
        # Host sync, once per layer: the all-to-all of the rows wants its split sizes as Python
        # ints.
        sent, received = torch.stack([sent_PE.sum(1), received_PE.sum(1)]).tolist()
        permuted = pad_to_alignment(received_PE, sum(received), self.row_alignment)
        return AllToAllPlan(
            tokens,
            sent,
            received,
            permuted.source_R,
            permuted.position_R[:, None],
            permuted.offsets_E,
        )

    def dispatch(self, x_TD: Tensor, weights_TK: Tensor, plan: AllToAllPlan) -> ExpertRows:
        tokens = plan.tokens
        x_ND = gather_rows(x_TD, tokens.token_N, tokens.rows_TK)
        weights_N1 = gather_rows(
            weights_TK.reshape(-1, 1), tokens.slot_N, tokens.rows_TK.view(-1, 1)
        )
        x_ND = all_to_all_rows(x_ND, plan.sent, plan.received, self.group)
        weights_N1 = all_to_all_rows(weights_N1, plan.sent, plan.received, self.group)
        return ExpertRows(
            x_RD=gather_rows(x_ND, plan.source_R, plan.position_N1),
            weights_R=gather_rows(weights_N1, plan.source_R, plan.position_N1)[:, 0],
            offsets_E=plan.offsets_E,
        )

    def combine(self, y_RD: Tensor, plan: AllToAllPlan) -> Tensor:
        y_ND = combine_rows(y_RD, plan.position_N1, plan.source_R)
        y_ND = all_to_all_rows(y_ND, plan.received, plan.sent, self.group)
        return combine_rows(y_ND, plan.tokens.rows_TK, plan.tokens.token_N)


def apply_expert_parallel(moe_layers: list[MoE], meshes: Meshes) -> None:
    """Shard the layers' experts over `ep` and let their tokens travel. No-op at degree 1."""
    degree = meshes.dims.ep
    if degree == 1:
        return
    for moe in moe_layers:
        num_local = moe.config.num_experts // degree
        _shard_experts(moe.experts, num_local, meshes)
        moe.dispatcher = AllToAllDispatcher(meshes.group("ep"), num_local, moe.config.row_alignment)


def _shard_experts(experts: Experts, num_local: int, meshes: Meshes) -> None:
    """Replace stacked weights [E, ...], on the meta device, by DTensors of this rank's block."""
    for name, weight in list(experts.named_parameters(recurse=False)):
        block = DTensor.from_local(weight[:num_local], meshes["ep"], [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(block))
    experts.compute = on_local_shards(experts.compute)


def on_local_shards(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Hand `compute` each weight's local block instead of the DTensor."""

    def compute_locally(rows: ExpertRows, *weights: DTensor) -> Tensor:
        return compute(rows, *(weight.to_local() for weight in weights))

    return compute_locally
