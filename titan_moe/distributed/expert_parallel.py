"""Expert parallelism: the experts are cut over (ep, etp), and tokens are sent to them.

Each rank of an `ep` group holds a block of the experts; each rank of an `etp` group holds a slice
of those experts' hidden dim. On entry every rank of a (dp_shard x cp x tp) block holds tokens of
its own, so nothing here needs to know how the dense part of the model was cut.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from titan_moe.distributed.dtensor import cut_parameter, local_part
from titan_moe.distributed.parallel_dims import Meshes
from titan_moe.moe.config import DispatchOptions, MoEConfig
from titan_moe.moe.dispatch.all_to_all import AllToAllDispatcher
from titan_moe.moe.dispatch.balanced import BalancedDispatcher, BalancedRoute
from titan_moe.moe.dispatch.base import Dispatcher, ExpertRows
from titan_moe.moe.dispatch.capacity import CapacityDispatcher
from titan_moe.moe.dispatch.deduplicated import DeduplicatedDispatcher, Nodes
from titan_moe.moe.dispatch.symmetric import SymmetricDispatcher
from titan_moe.moe.experts import ExpertWeights
from titan_moe.moe.layer import Experts, MoE

# The dim that etp cuts of each stack: the hidden dim F. Of b2 [E, D], which is added to a sum over
# F that the ranks share, it is D: each rank adds it to a slice. Stacks of adapters that have no F
# are whole, and each rank's gradient of them is a part of a sum.
_CUT_BY_ETP = {"w1": 1, "w2": 2, "w3": 1, "b1": 1, "b2": 1, "b3": 1}
_CUT_BY_ETP |= {"w1_b": 1, "w3_b": 1, "w2_a": 2}


def join_sequences(moe_layers: list[MoE], meshes: Meshes) -> None:
    """Let balance losses see whole sequences, which cp and tp cut, and give each tp rank its own
    part of the mask of counted tokens."""
    group = meshes.group("sequence")
    if group.size() == 1:
        return
    for moe in moe_layers:
        moe.sequence_group = group
        moe.register_forward_pre_hook(partial(_own_counted, group=meshes.group("tp")))


def _own_counted(moe: MoE, args: tuple[Any, ...], group: ProcessGroup) -> tuple[Any, ...]:
    x_BSD, counted_BS, *stream = args
    if counted_BS is not None:
        counted_BS = counted_BS.chunk(group.size(), 1)[group.rank()]
    return x_BSD, counted_BS, *stream


def apply_expert_parallel(moe_layers: list[MoE], meshes: Meshes, options: DispatchOptions) -> None:
    """Cut the layers' experts over (ep, etp) and set their dispatchers. No-op at degree 1."""
    dims = meshes.dims
    if dims.ep * dims.etp == 1:
        return
    for moe in moe_layers:
        _cut_experts(moe.experts, meshes)
        moe.dispatcher = DISPATCHERS[options.name](moe.config, meshes, options)
        moe.num_chunks = options.num_chunks
        if options.name == "balanced":
            moe.experts.register_forward_pre_hook(_start_loans)


def partial_over_etp(model: nn.Module, meshes: Meshes) -> set[str]:
    """Returns the names of the routed experts' parameters that etp does not cut: each of its ranks
    has a part of the sum that is their gradient."""
    if meshes.dims.etp == 1:
        return set()
    names = (name for name, _ in model.named_parameters() if ".experts." in name)
    return {name for name in names if name.rpartition(".")[2] not in _CUT_BY_ETP}


DISPATCHERS: dict[str, Callable[[MoEConfig, Meshes, DispatchOptions], Dispatcher]] = {
    "standard": lambda config, meshes, _: AllToAllDispatcher(*_groups(meshes), config),
    "deduplicated": lambda config, meshes, options: DeduplicatedDispatcher(
        *_groups(meshes), config, nodes_of(meshes, options.ranks_per_node)
    ),
    "balanced": lambda config, meshes, _: BalancedDispatcher(*_groups(meshes), config),
    "capacity": lambda config, meshes, options: CapacityDispatcher(
        *_groups(meshes), config, cast(float, options.capacity_factor)
    ),
    "symmetric": lambda config, meshes, options: SymmetricDispatcher(
        *_groups(meshes), config, options.capacity_factor
    ),
}


def _groups(meshes: Meshes) -> tuple[ProcessGroup, ProcessGroup]:
    return meshes.group("ep"), meshes.group("etp")


def _cut_experts(experts: Experts, meshes: Meshes) -> None:
    """Replace stacked weights, on the meta device, by DTensors of this rank's experts and slice."""
    axes = tuple(axis for axis in ("ep", "etp") if meshes.dims.size(axis) > 1)
    for module in experts.modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            dims = {"ep": 0, "etp": _CUT_BY_ETP.get(name)}
            cut_parameter(module, name, meshes[axes], [dims[axis] for axis in axes])
    hook = partial(_own_shards, etp_group=meshes.group("etp"))
    experts.compute.register_forward_pre_hook(hook)


def _own_shards(
    module: Any, args: tuple[ExpertRows, ExpertWeights], etp_group: ProcessGroup
) -> tuple[ExpertRows, ExpertWeights]:
    """Replaces each weight by this rank's shard and those of borrowed experts, and fills b2 up with
    zeros for the slices of D that other ranks add."""
    rows, weights = args
    place, slices = etp_group.rank(), etp_group.size()
    own = {name: local_part(weight) for name, weight in weights.items()}
    if rows.borrowed is not None:
        own = {name: rows.borrowed.join(name, weight) for name, weight in own.items()}
    if "b2" in own and slices > 1:
        width = own["b2"].shape[1]
        own["b2"] = F.pad(own["b2"], (place * width, (slices - 1 - place) * width))
    return rows, own


def _start_loans(experts: Experts, args: tuple[Any, Any, list[BalancedRoute]]) -> None:
    """Lets weights of lent experts travel before rows are waited for. FSDP has gathered them."""
    for route in args[2]:
        if route.borrowed is not None:
            route.borrowed.start({n: local_part(p) for n, p in experts.named_parameters()})


def nodes_of(meshes: Meshes, ranks_per_node: int | None) -> Nodes | None:
    """Makes the groups of ranks that an ep group has on this node and across nodes; collective.

    Returns None if there is nothing to deduplicate between nodes: all ranks of an ep group are on
    one node, each node has one of them, or nodes cut the group unevenly.
    """
    dims = meshes.dims
    size = dims.ranks_on_node(ranks_per_node or dims.world_size)
    if size is None:
        return None
    ranks, place = meshes.members("ep"), dims.coordinate(meshes.rank, "ep")
    kind, first = ("tokens", meshes.groups.comm.axes.get("ep")), place // size * size
    return Nodes(
        across=meshes.groups.get(ranks[place % size :: size], kind, "ep across nodes"),
        within=meshes.groups.get(ranks[first : first + size], kind, "ep within a node"),
    )
