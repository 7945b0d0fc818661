"""FSDP2, HSDP and plain data parallelism, by one mechanism: torch's fully_shard.

Every reduction is a plain sum (docs/parallelism.md, "One rule for gradients"). Data parallelism
alone is HSDP whose shard axis has one rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import Shard

from titan_moe.distributed.dtensor import local_part
from titan_moe.distributed.parallel_dims import Meshes
from titan_moe.moe.layer import MoE


@dataclass(frozen=True)
class ShardingPolicy:
    """Says in which types parameters are kept and computed, and how long they stay gathered."""

    stored_dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard_after_forward: bool
    """Applies to all units but the last, which the backward needs first."""
    reshard_last: bool
    reshard_unsharded: bool
    """Applies to units on a mesh of one rank, which `reshard_after_forward` frees otherwise: their
    gathered parameters are copies in `compute_dtype`."""
    cpu_offload: bool


def shard_dim(shape: torch.Size, num_shards: int) -> int:
    """The tensor dim to shard: dim 0 unless that leaves a rank empty and another dim would divide.

    fully_shard cuts dim 0 like torch.chunk, unevenly if need be; other dims it wants to divide.
    """
    rows_per_rank = -(-shape[0] // num_shards)
    if rows_per_rank * (num_shards - 1) < shape[0]:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % num_shards == 0), 0)


def apply_fsdp(
    model: nn.Module,
    chains: list[list[nn.Module]],
    meshes: Meshes,
    policy: ShardingPolicy,
    wide: Iterable[nn.Module] = (),
) -> None:
    """Shard routed experts over (dp_replicate, edp), the rest over (dp_replicate, fsdp).

    Experts are units of their own where that is another mesh; elsewhere they would only double the
    collectives. On one rank, with nothing to cast or to offload, the model stays as it is: FSDP
    would copy all parameters and gradients twice.

    Args:
        model: the root; takes what no unit holds.
        chains: units in forward order; a unit is gathered at once, perhaps without its experts.
            While a unit computes, the next one of its chain is gathered. A unit that some forwards
            skip is a chain of its own. The backward begins with the last unit of the first chain.
        wide: modules inside units whose parameters are at least float32, and so travel apart where
            a unit computes in less: FSDP has one type of gradients a unit. Each is gathered once a
            forward and reduced once a backward; a few numbers a head stay gathered between.
    """
    dims = meshes.dims
    experts_apart = dims.tp * dims.ep * dims.etp > 1
    is_cast = policy.compute_dtype != policy.stored_dtype
    if dims.world_size == 1 and not (is_cast or policy.cpu_offload):
        return
    at_least_float32 = replace(
        policy,
        compute_dtype=torch.promote_types(policy.compute_dtype, torch.float32),
        reduce_dtype=torch.promote_types(policy.reduce_dtype, torch.float32),
    )
    if at_least_float32.compute_dtype != policy.compute_dtype:
        for module in wide:
            _shard(module, meshes, "fsdp", at_least_float32, reshard=False)
    for unit in chain.from_iterable(chains):
        last = unit is chains[0][-1]
        reshard = policy.reshard_last if last else policy.reshard_after_forward
        for moe in _moe_layers(unit) if experts_apart else []:
            _shard(moe.experts, meshes, "edp", policy, reshard=reshard)
        _shard(unit, meshes, "fsdp", policy, reshard=reshard)
    _shard(model, meshes, "fsdp", policy, reshard=policy.reshard_last)
    for units in chains:
        _prefetch(units)
    # torch 2.11 and 2.12 have one buffer alone.
    set_buffers = getattr(model, "set_reduce_scatter_max_input_buffers", None)
    if experts_apart and meshes["fsdp"].device_type == "cuda" and set_buffers is not None:
        # A layer has two reductions, of its experts and of its other parameters. With one buffer
        # the end of its backward waits for the first, which attention alone has hidden.
        set_buffers(2)


class StepSync:
    """Tells FSDP before each microbatch whether it frees parameters and reduces gradients.

    With "keep_gathered" only the last microbatch does; until then gradients add up on the device
    in `reduce_dtype`. A unit on a mesh of one rank, such as experts whose `edp` is 1, adds them up
    so with each word: there they are no larger than their shards, and torch would write each
    microbatch's gradients two times more, to reduce them over one rank. With "keep_unsharded" it
    keeps its parameters too: torch would cast them and copy them again, twice a microbatch.

    Args:
        model: the root that `apply_fsdp` has sharded.
        accumulation: `parallelism.fsdp_accumulation`, "auto" resolved.
        cpu_offload: whether gradients leave the device after each microbatch.
    """

    def __init__(
        self, model: nn.Module, meshes: Meshes, accumulation: str, *, cpu_offload: bool
    ) -> None:
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        experts = {id(moe.experts) for moe in _moe_layers(model)}

        def is_alone(unit: FSDPModule) -> bool:
            return _data_mesh(meshes, "edp" if id(unit) in experts else "fsdp").size() == 1

        alone = [unit for unit in units if is_alone(unit)]
        self._gathered = {"keep_gathered": units, "keep_unsharded": alone}.get(accumulation, [])
        self._summed = self._gathered
        if accumulation != "keep_gathered":
            self._summed = [] if cpu_offload else alone
        self._is_last = True

    def begin(self, *, last: bool) -> None:
        """Runs before a microbatch's forward; the `last` one makes up for all that was left out."""
        if last == self._is_last:
            return
        self._is_last = last
        for unit in self._summed:
            unit.set_requires_gradient_sync(last, recurse=False)
        for unit in self._gathered:
            unit.set_reshard_after_backward(last, recurse=False)


def _data_mesh(meshes: Meshes, shard_axis: str) -> DeviceMesh:
    if meshes.dims.dp_replicate > 1:
        return meshes["dp_replicate", shard_axis]
    return meshes[shard_axis]


def _moe_layers(unit: nn.Module) -> list[MoE]:
    return [module for module in unit.modules() if isinstance(module, MoE)]


def _shard(
    module: nn.Module, meshes: Meshes, axis: str, policy: ShardingPolicy, *, reshard: bool
) -> None:
    mesh, group = _data_mesh(meshes, axis), meshes.gradient_group(axis)
    num_shards = mesh.size(mesh.ndim - 1)
    reshard = reshard and (mesh.size() > 1 or policy.reshard_unsharded)
    offload = CPUOffloadPolicy() if policy.cpu_offload else OffloadPolicy()
    sharded = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=reshard,
        shard_placement_fn=lambda p: Shard(shard_dim(local_part(p).shape, num_shards)),
        # Inputs keep their types: rotations and routing weights are float32 beside bfloat16 rows.
        mp_policy=MixedPrecisionPolicy(
            param_dtype=policy.compute_dtype,
            reduce_dtype=policy.reduce_dtype,
            cast_forward_inputs=False,
        ),
        offload_policy=offload,
    )
    if mesh.size() > 1:  # Else torch would divide by 1, a pass over all gradients.
        sharded.set_gradient_divide_factor(1.0)
    # gloo has no pre-multiplied sum, which a divide factor would otherwise ask for.
    sharded.set_force_sum_reduction_for_comms(True)
    by_gloo = mesh.device_type == "cpu" and dist.get_backend(group) == "gloo"
    sharded.set_custom_reduce_scatter((ExchangedSum if by_gloo else GroupSum)(group))


@dataclass
class GroupSum(DefaultReduceScatter):
    """FSDP2's reduce-scatter, over `group` in place of the group that gathers. torch 2.13 can make
    another itself, but without our options and time limits."""

    group: ProcessGroup

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **{**kwargs, "group": self.group})


class ExchangedSum(GroupSum):
    """A reduce-scatter for gloo, whose own is an all-reduce that sends twice the bytes: an exchange
    of parts, and a local sum in the order of ranks."""

    def __call__(self, output_tensor, input_tensor, **_):  # type: ignore[override, no-untyped-def]
        """Writes this rank's part, [n], of the sum over ranks of inputs of [P n]."""
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=self.group)
        first, second, *others = parts.chunk(self.group.size())
        torch.add(first, second, out=output_tensor)
        for part in others:
            output_tensor.add_(part)


def _prefetch(units: list[nn.Module]) -> None:
    """Gather the next unit while one computes: in forward order, and backwards in the backward."""
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch(_gathered_apart(following))  # type: ignore[operator]
        following.set_modules_to_backward_prefetch(_gathered_apart(unit))  # type: ignore[operator]


def _gathered_apart(unit: nn.Module) -> list[FSDPModule]:
    return [module for module in unit.modules() if isinstance(module, FSDPModule)]
