"""Expert parallelism: the experts are cut over (ep, etp), and tokens travel to them.

Each rank of an `ep` group holds a block of the experts; each rank of an `etp` group holds a slice
of those experts' hidden dim. On entry every rank of a (dp_shard x cp x tp) block holds tokens of
its own, so nothing here needs to know how the dense part of the model was cut.
"""

from dataclasses import dataclass

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_moe.distributed.dtensor import cut_parameter, local_part
from titan_moe.distributed.mesh import Meshes
from titan_moe.distributed.process_groups import Traffic
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.dispatch.all_to_all import AllToAllDispatcher
from titan_moe.moe.dispatch.base import Dispatcher, ExpertRows
from titan_moe.moe.dispatch.capacity import BoundedDispatcher
from titan_moe.moe.dispatch.deduplicated import DeduplicatedDispatcher
from titan_moe.moe.dispatch.nodes import Nodes
from titan_moe.moe.experts import Compute, Experts, ExpertWeights
from titan_moe.moe.layer import MoE

# The dim that etp cuts of each stack: the hidden dim F. Of b2 [E, D], which is added to a sum over
# F that the ranks share, it is D: each rank adds it to a slice.
_CUT_BY_ETP = {"w1": 1, "w2": 2, "w3": 1, "b1": 1, "b2": 1, "b3": 1}


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


@dataclass(frozen=True)
class DispatchPolicy:
    """How rows travel."""

    deduplicated: bool = False
    """A token goes once to each rank, and once to each node."""
    capacity_factor: float | None = None
    """Of bounded buffers; None: as large as they must be."""
    ranks_per_node: int | None = None
    """None: all ranks are on one node."""


def apply_expert_parallel(
    moe_layers: list[MoE], meshes: Meshes, policy: DispatchPolicy | None = None
) -> None:
    """Cut the layers' experts over (ep, etp) and let their tokens travel. No-op at degree 1."""
    dims = meshes.dims
    if dims.ep * dims.etp == 1:
        return
    for moe in moe_layers:
        _cut_experts(moe.experts, meshes)
        moe.dispatcher = make_dispatcher(moe.config, meshes, policy or DispatchPolicy())


def make_dispatcher(config: MoEConfig, meshes: Meshes, policy: DispatchPolicy) -> Dispatcher:
    """One layer's dispatcher between the ranks of (ep, etp)."""
    groups = meshes.group("ep"), meshes.group("etp")
    num_local, alignment = config.num_experts // meshes.dims.ep, config.row_alignment
    if policy.capacity_factor is not None:
        return BoundedDispatcher(
            *groups,
            num_local=num_local,
            row_alignment=alignment,
            top_k=config.top_k,
            capacity_factor=policy.capacity_factor,
        )
    if policy.deduplicated:
        return DeduplicatedDispatcher(
            *groups,
            num_local=num_local,
            row_alignment=alignment,
            top_k=config.top_k,
            nodes=nodes_of(meshes, policy.ranks_per_node or meshes.dims.world_size),
        )
    return AllToAllDispatcher(*groups, num_local=num_local, row_alignment=alignment)


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


def nodes_of(meshes: Meshes, ranks_per_node: int) -> Nodes | None:
    """None where the ep group is on one node, where each node has one rank of it, and where nodes
    do not cut it evenly. Collective over the group."""
    dims = meshes.dims
    size = ranks_per_node // dims.etp
    even = ranks_per_node % dims.etp == 0 and size > 0 and dims.ep % size == 0
    if not even or size in (1, dims.ep):
        return None
    ranks, place = dims.group_of(meshes.rank, "ep"), dims.coordinate(meshes.rank, "ep")
    node = place // size
    return Nodes(
        across=meshes.groups.get(ranks[place % size :: size], Traffic.TOKENS),
        within=meshes.groups.get(ranks[node * size : (node + 1) * size], Traffic.TOKENS),
    )
