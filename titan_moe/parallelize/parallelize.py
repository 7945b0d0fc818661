"""Makes a sharded model of a plan; no other file knows models and meshes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from titan_moe.comm import symmetric_memory
from titan_moe.config.job_config import JobConfig
from titan_moe.distributed.activation_checkpoint import KeptAttention, apply_activation_checkpoint
from titan_moe.distributed.compile import apply_compile, compile_loss
from titan_moe.distributed.context_parallel.apply import (
    Positions,
    context_parallel_core,
    local_positions,
)
from titan_moe.distributed.context_parallel.recurrence import SegmentedRecurrence
from titan_moe.distributed.context_parallel.sparse import sparse_core
from titan_moe.distributed.execution import Execution, WholeModel
from titan_moe.distributed.expert_parallel import (
    apply_expert_parallel,
    join_sequences,
    partial_over_etp,
)
from titan_moe.distributed.fsdp import ShardingPolicy, StepSync, apply_fsdp
from titan_moe.distributed.init_weights import fill_initial_weights
from titan_moe.distributed.parallel_dims import Meshes
from titan_moe.distributed.process_groups import ProcessGroups
from titan_moe.distributed.tensor_parallel import VocabParallelCrossEntropy, apply_tensor_parallel
from titan_moe.distributed.tied_weights import TiedWeights, find_tied_weights
from titan_moe.models.attention import plain_core, takes_flex
from titan_moe.models.config import ModelConfig, moe_layer_names, tied_weights
from titan_moe.models.decoder import (
    ADAPTER,
    Decoder,
    initial_std,
    keep_only,
    move_off_meta,
    stage_units,
    stored_in,
    wide_units,
)
from titan_moe.models.lora import adapt
from titan_moe.models.output import Output
from titan_moe.models.quantize import check_hardware, quantize
from titan_moe.models.recurrent_config import RecurrentConfig
from titan_moe.models.tensor_plan import TENSOR_PLAN
from titan_moe.models.trained import freeze
from titan_moe.moe.dispatch.symmetric import SymmetricDispatcher
from titan_moe.moe.layer import MoE
from titan_moe.moe.router import Router
from titan_moe.ops.attention import AttentionCore
from titan_moe.ops.gated_delta import Recurrence, choose_rule
from titan_moe.optim.optimizers import make_joined_groups
from titan_moe.parallelize.plan import Plan
from titan_moe.parallelize.policies import make_plan
from titan_moe.runtime.device import memory_of
from titan_moe.runtime.log import logger


@dataclass(frozen=True)
class ShardedModel:
    """A model laid out over the ranks, ready to train."""

    plan: Plan
    parts: list[Decoder]
    """The whole model, or this rank's stages of a pipeline in their order."""
    meshes: Meshes
    device: torch.device
    execution: Execution
    positions: Positions
    partial: dict[str, list[nn.Parameter]]
    """Parameters whose gradients are still to be summed over an axis, by axis."""
    tied_weights: TiedWeights
    """Copies of parameters whose gradients are still to be summed over them."""
    names: list[str]
    """Every parameter of the whole model, on whichever rank, in order; of copies, the first."""
    counts_targets: bool
    """True if this rank is the first of those that read the same tokens: those of tp and pp."""

    @property
    def config(self) -> ModelConfig:
        return self.plan.config

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, under their names in the whole model."""
        for part in self.parts:
            yield from part.named_parameters()

    def moe_layers(self) -> dict[str, MoE]:
        """This rank's MoE layers by the name of their block."""
        return {name: moe for part in self.parts for name, moe in part.moe_layers().items()}

    def train(self, mode: bool) -> None:
        """Switch all parts between training and evaluation."""
        for part in self.parts:
            part.train(mode)

    def all_moe_layers(self) -> list[str]:
        """The names of the whole model's MoE layers, in order."""
        return moe_layer_names(self.config)


def plan_here(
    job: JobConfig, config: ModelConfig, device: torch.device, ranks_per_node: int | None = None
) -> Plan:
    """Returns the plan of a job for an initialised world whose ranks compute on such a device."""
    return make_plan(
        job,
        config,
        dist.get_world_size(),
        device_type=device.type,
        device_bytes=memory_of(device),
        ranks_per_node=ranks_per_node,
    )


def build_sharded_model(
    plan: Plan,
    device: torch.device,
    *,
    draw_weights: bool = True,
    groups: ProcessGroups | None = None,
) -> ShardedModel:
    """Lay a model out over an initialised world, as `policies.make_plan` says; collective over all
    ranks.

    `draw_weights`: whether parameters get their initial values. `groups`: those of another layout
    of the same world, used again."""
    job, config, dims = plan.job, plan.config, plan.dims
    check_hardware(job.model.converters, job.quantize, device)

    # 1. The two views of the world.
    meshes = dims.build_mesh(device.type, groups or ProcessGroups(job.comm))

    # 2 to 6. The model, cut to what this rank holds of it, without memory.
    parts, partly, names = lay_out(plan, meshes)
    if plan.job.debug.routing is None:
        warn_of_unbalanced_experts(config, parts)

    # 7. Memory and first values, the same bits in every layout.
    for part in parts:
        at_rest = torch.device("cpu") if plan.cpu_offload else device
        move_off_meta(part, device, parameter_device=at_rest)
        if draw_weights:
            std_of, drawn_as = partial(initial_std, config=config), first_names(config)
            fill_initial_weights(part, job.debug.seed, std_of, drawn_as=drawn_as, device=device)
    if plan.exchange_rows:
        _open_symmetric_memory(parts, plan, meshes, device)

    # 8. NCCL's communicators, before activations fill the memory.
    named = {name: p for part in parts for name, p in part.named_parameters()}
    make_joined_groups(job.optimizer, named, meshes.group)
    if device.type == "cuda":
        meshes.groups.connect(meshes.group("ep"), device)

    # 9. The object that runs it: all layers at once, or a pipeline's schedule.
    execution = _execution(parts, plan, meshes, device)
    ranks, last = meshes.members("pp"), len(plan.stages) - 1
    ends = ranks[0], next(ranks[i] for i, held in enumerate(plan.stages_of_ranks) if last in held)
    return ShardedModel(
        plan,
        parts,
        meshes,
        device,
        execution,
        positions=_positions(plan, meshes),
        partial={axis: [named[n] for n in named if n in some] for axis, some in partly.items()},
        tied_weights=find_tied_weights(tied_weights(config), named, ends),
        names=names,
        counts_targets=not any(dims.coordinate(meshes.rank, axis) for axis in ("tp", "pp")),
    )


def first_names(config: ModelConfig) -> dict[str, str]:
    """Returns, for each further copy of a tied parameter, the name of its first copy."""
    return {copy: first for first, *copies in tied_weights(config) for copy in copies}


class Parts(NamedTuple):
    """Holds a rank's part of a model, on the meta device."""

    parts: list[Decoder]
    partial: dict[str, set[str]]
    """Names of parameters whose gradients are still to be summed over an axis, by axis."""
    names: list[str]
    """Every parameter of the whole model."""


def lay_out(plan: Plan, meshes: Meshes) -> Parts:
    """Steps 2 to 6 of `build_sharded_model`: a model cut to this rank's part of it.

    Needs no memory for the model and exchanges nothing, so that a fake world of any size will do.
    """
    job = plan.job
    # 2. The plain model, without memory, and the stages of it that this rank holds.
    plain = _plain_model(plan, *_cores(plan, meshes))
    copies = first_names(plan.config)
    names = [name for name, _ in plain.named_parameters() if name not in copies]
    parts = _own_parts(plain, plan, meshes)

    if plan.dispatch_reason:
        line = "expert_parallel_comm_backend=auto is %s: %s"
        logger.info(line, plan.dispatch.name, plan.dispatch_reason)
    partly: dict[str, set[str]] = {"tp": set(), "etp": set()}
    for part in parts:
        # 3. What multiplies in low precision, while every weight is whole.
        if found := quantize(part, job.model.converters, job.quantize):
            words = ", ".join(job.model.converters), len(found), found[0], found[-1]
            logger.info("%s: %d Linear and MoE layers, %s to %s", *words)

        # 4. Experts to their ranks, before anything else looks at parameters; then heads and
        # hidden dims, and losses that ask for whole sequences.
        moe_layers = list(part.moe_layers().values())
        apply_expert_parallel(moe_layers, meshes, plan.dispatch)
        partly["etp"] |= partial_over_etp(part, meshes)
        partly["tp"] |= apply_tensor_parallel(part, TENSOR_PLAN, meshes)
        join_sequences(moe_layers, meshes)
        freeze(part, job.training, job.lora)

        # 5. Compiled blocks inside recomputation, which runs them twice; both inside FSDP's hooks,
        # so that a recomputed block finds its gathered parameters.
        recompute = job.activation_checkpoint
        apply_compile(
            part.blocks().values(),
            job.compile,
            recompute,
            eager_routing=any(
                (job.debug.routing_record, job.debug.routing_replay, job.debug.router_load)
            ),
            pipelined_tp=meshes.group("tp") if plan.pipelined_tp else None,
        )
        apply_activation_checkpoint(part, recompute, compiled=job.compile.compiles_layers)
        _choose_loss(part.output, plan, meshes)

        # 6. Data parallelism over all of it.
        apply_fsdp(part, stage_units(part), meshes, _sharding_policy(plan), wide_units(part))
    return Parts(parts, partly, names)


def _choose_loss(output: nn.Module, plan: Plan, meshes: Meshes) -> None:
    """Sets the cross-entropy of the output layer, if the stage has it, and its tokens per chunk."""
    if not isinstance(output, Output):
        return
    cut = plan.dims.tp > 1
    loss = VocabParallelCrossEntropy(meshes.group("tp")) if cut else output.cross_entropy
    output.cross_entropy = compile_loss(loss, plan.job.compile, plan.device_type)
    output.chunk_size = plan.job.training.loss_chunk_size


def _sharding_policy(plan: Plan) -> ShardingPolicy:
    stored, compute, reduce = map(_dtype, plan.types)
    frees, last = plan.reshard_after_forward, plan.reshard_last
    frees_unsharded = plan.accumulation != "keep_unsharded"
    return ShardingPolicy(stored, compute, reduce, frees, last, frees_unsharded, plan.cpu_offload)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _plain_model(plan: Plan, core: AttentionCore, recurrence: Recurrence | None) -> Decoder:
    adapts = plan.job.lora.rank is not None
    with torch.device("meta"):
        model = Decoder(plan.config, core, recurrence)
        adapt(model, plan.job.lora)
    # Buffers keep their types: biases of 1e-3. Nothing is added to base weights.
    for name, parameter in model.named_parameters():
        is_base = adapts and ADAPTER not in name
        stored = _dtype(plan.types.compute if is_base else plan.types.stored)
        parameter.data = parameter.data.to(stored_in(name, stored))
    return model


def _cores(plan: Plan, meshes: Meshes) -> tuple[Any, Any]:
    """Returns an AttentionCore, and a Recurrence if layers recur, which all layers share."""
    core: Any = _attention_core(plan, meshes)
    recurrence: Any = plan.config.recurrent and _recurrence(plan, plan.config.recurrent, meshes)
    section = plan.job.activation_checkpoint
    if not plan.job.compile.compiles_layers:
        if section.by_operation or section.keep_attention:
            core = KeptAttention(core)
        if section.by_operation and recurrence:
            recurrence = KeptAttention(recurrence)
    return core, recurrence


def _attention_core(plan: Plan, meshes: Meshes) -> AttentionCore:
    config, masked, balanced = plan.config, plan.job.training.mask_documents, plan.head_tail
    if config.indexer is not None:
        groups = {"tp_group": meshes.group("tp"), "cp_group": meshes.group("cp")}
        return sparse_core(**groups, balanced=balanced, mask_documents=masked)
    dtype, device = _dtype(plan.types.compute), plan.device_type
    plain = plain_core(config, mask_documents=masked, dtype=dtype, device_type=device)
    if plan.dims.cp == 1:
        return plain
    return context_parallel_core(
        plain,
        group=meshes.group("cp"),
        method=plan.job.parallelism.context_parallel_rotate_method,
        balanced=balanced,
        mask_documents=masked,
        takes_flex=takes_flex(config, dtype, device),
    )


def _recurrence(plan: Plan, config: RecurrentConfig, meshes: Meshes) -> Recurrence:
    rule = choose_rule(plan.device_type, _dtype(plan.types.compute), config.key_dim)
    masked = plan.job.training.mask_documents
    if plan.dims.cp == 1:
        return Recurrence(rule, mask_documents=masked)
    balanced, group = plan.head_tail, meshes.group("cp")
    return SegmentedRecurrence(rule, group, balanced=balanced, mask_documents=masked)


def _positions(plan: Plan, meshes: Meshes) -> Positions:
    rank, size = plan.dims.coordinate(meshes.rank, "cp"), plan.dims.cp
    return cache(partial(local_positions, cp_size=size, cp_rank=rank, balanced=plan.head_tail))


def _own_parts(plain: Decoder, plan: Plan, meshes: Meshes) -> list[Decoder]:
    if plan.dims.pp == 1:
        return [plain]
    own = plan.stages_of_ranks[plan.dims.coordinate(meshes.rank, "pp")]
    return [
        keep_only(_plain_model(plan, plain.core, plain.recurrence), plan.stages[stage])
        for stage in own
    ]


def _execution(parts: list[Decoder], plan: Plan, meshes: Meshes, device: torch.device) -> Execution:
    if plan.dims.pp == 1:
        sync = StepSync(parts[0], meshes, plan.accumulation, cpu_offload=plan.cpu_offload)
        return WholeModel(parts[0], sync)
    from titan_moe.distributed.pipeline.schedule import Pipeline

    return Pipeline(
        list(parts),
        meshes=meshes,
        parallelism=plan.job.parallelism,
        dim=plan.config.dim * plan.config.streams,
        dtype=_dtype(plan.types.compute),
        device=device,
    )


def _open_symmetric_memory(
    parts: list[Decoder], plan: Plan, meshes: Meshes, device: torch.device
) -> None:
    """Gives symmetric dispatchers the buffers that they share, for the job's largest microbatch.
    Collective over the world, also on ranks without such a layer.

    Raises ConfigError where torch or the machine lacks symmetric memory.
    """
    symmetric_memory.check_available(device)
    dtype, group = _dtype(plan.types.compute), meshes.group("ep")
    channels = symmetric_memory.open_channels(
        group, plan.exchange_rows, plan.config.row_dim, dtype, device
    )
    for moe in (each for part in parts for each in part.moe_layers().values()):
        assert isinstance(moe.dispatcher, SymmetricDispatcher)
        moe.dispatcher.channels = channels


def warn_of_unbalanced_experts(config: ModelConfig, parts: Iterable[nn.Module]) -> None:
    """Warn, once, where no rule and no loss keeps the load even of routers that train, on these
    parts of the model. A weight in a config.json is not read: transformers' loss is over all layers
    at once."""
    routers = [each for part in parts for each in part.modules() if isinstance(each, Router)]
    learn = any(router.gate.weight.requires_grad for router in routers)
    unbalanced = config.moe is not None and not config.moe.is_balanced
    if unbalanced and learn and dist.get_rank() == 0:
        logger.warning(
            "nothing balances the experts: moe.bias_update_speed and the weights of both balance "
            "losses are 0; set one of them, such as moe.global_aux_loss_weight"
        )
