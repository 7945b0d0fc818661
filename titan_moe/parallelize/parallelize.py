"""Makes a sharded model of a resolved configuration; no other file knows models and meshes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from titan_moe.config.job_config import JobConfig, Parallelism
from titan_moe.config.pipeline import model_parts, module_names, schedule_of, stages_of_rank
from titan_moe.distributed.activation_checkpoint import (
    KeptAttention,
    apply_activation_checkpoint,
    recomputes_by_operation,
)
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
from titan_moe.distributed.fsdp import StepSync, apply_fsdp
from titan_moe.distributed.init_weights import fill_initial_weights
from titan_moe.distributed.parallel_dims import Meshes, parallel_dims
from titan_moe.distributed.process_groups import ProcessGroups
from titan_moe.distributed.tensor_parallel import VocabParallelCrossEntropy, apply_tensor_parallel
from titan_moe.distributed.tied_weights import TiedWeights, find_tied_weights
from titan_moe.models.attention import plain_core, takes_flex
from titan_moe.models.config import GatedDeltaConfig, ModelConfig, moe_layer_names, tied_weights
from titan_moe.models.decoder import (
    ADAPTER,
    TENSOR_PLAN,
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
from titan_moe.models.stats import part_flops
from titan_moe.models.trained import freeze
from titan_moe.moe.layer import MoE
from titan_moe.ops.attention import AttentionCore
from titan_moe.ops.gated_delta import Recurrence, RecurrentCore, choose_rule
from titan_moe.optim.optimizers import make_joined_groups
from titan_moe.parallelize.memory import Accumulation, choose_accumulation
from titan_moe.parallelize.memory_table import Setup
from titan_moe.parallelize.policies import (
    compute_dtype,
    dispatch_options,
    open_symmetric_memory,
    resolve_model,
    sharding_policy,
    stored_dtype,
    warn_of_unbalanced_experts,
)
from titan_moe.runtime.device import memory_of
from titan_moe.runtime.log import logger


@dataclass(frozen=True)
class ShardedModel:
    """A model laid out over the ranks, ready to train."""

    parts: list[Decoder]
    """The whole model, or this rank's stages of a pipeline in their order."""
    config: ModelConfig
    meshes: Meshes
    execution: Execution
    positions: Positions
    partial: dict[str, list[nn.Parameter]]
    """Parameters whose gradients are still to be summed over an axis, by axis."""
    tied_weights: TiedWeights
    """Copies of parameters whose gradients are still to be summed over them."""
    names: list[str]
    """Every parameter of the whole model, on whichever rank, in order; of copies, the first."""
    stages: list[list[str]]
    """The modules of each stage of the pipeline; of one without a pipeline."""
    counts_targets: bool
    """True if this rank is the first of those that read the same tokens: those of tp and pp."""
    accumulation: Accumulation
    """Sharing of gathered parameters and reductions between the microbatches of a step."""
    stops_on_overflow: bool = False
    """True if a step, or a validation, that dropped rows does not count and ends the run."""
    counts_in_documents: bool = False
    """True if positions count in the document, since attention depends on them; else in the row."""
    counts_answers: bool = False
    """True if routers count, and balance, tokens with a target alone: those of conversations, whose
    losses' divisor would else be a part of the tokens summed."""
    compiled: bool = False
    """True if layers are compiled: a value of Python that changes would compile them again."""

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


def build_sharded_model(
    job: JobConfig,
    config: ModelConfig,
    *,
    device: torch.device,
    world_size: int,
    ranks_per_node: int | None = None,
    draw_weights: bool = True,
    groups: ProcessGroups | None = None,
) -> ShardedModel:
    """Lay a model out over an initialised world; collective over all ranks.

    `ranks_per_node`: left out, all ranks are on one node. `draw_weights`: whether parameters get
    their initial values. `groups`: those of another layout of the same world, used again."""
    check_hardware(job.model.converters, job.quantize, device)

    # 1. The two views of the world.
    dims = parallel_dims(job.parallelism, world_size)
    meshes = dims.build_mesh(device.type, groups or ProcessGroups(job.comm))

    # 2 to 6. The model, cut to what this rank holds of it, without memory.
    config = resolve_model(config, job, device.type)
    laid_out = lay_out(job, config, meshes, device, ranks_per_node)
    parts, partly, names, stages, accumulation = laid_out
    warn_of_unbalanced_experts(config, parts)

    # 7. Memory and first values, the same bits in every layout.
    offloaded = torch.device("cpu") if job.training.enable_cpu_offload else device
    for part in parts:
        move_off_meta(part, device, parameter_device=offloaded)
        if draw_weights:
            std_of, drawn_as = partial(initial_std, config=config), first_names(config)
            fill_initial_weights(part, job.debug.seed, std_of, drawn_as=drawn_as, device=device)
    open_symmetric_memory(parts, job, config, meshes, device)

    # 8. NCCL's communicators, before activations fill the memory.
    named = {name: p for part in parts for name, p in part.named_parameters()}
    make_joined_groups(job.optimizer, named, meshes.group)
    if device.type == "cuda":
        meshes.groups.connect(meshes.group("ep"), device)

    ends = _pipeline_ends(job, meshes, len(stages))
    return ShardedModel(
        parts,
        config,
        meshes,
        # 9. Who runs it: all layers at once, or a pipeline's schedule.
        execution=_execution(parts, job, config, meshes, device, accumulation.word),
        positions=_positions(job.parallelism, meshes),
        partial={axis: [named[n] for n in named if n in some] for axis, some in partly.items()},
        tied_weights=find_tied_weights(tied_weights(config), named, ends),
        names=names,
        stages=stages,
        counts_targets=not any(dims.coordinate(meshes.rank, axis) for axis in ("tp", "pp")),
        accumulation=accumulation,
        stops_on_overflow=job.parallelism.expert_parallel_overflow == "stop",
        counts_in_documents=job.training.mask_documents and config.has_temperature,
        counts_answers=job.training.dataset_format == "messages",
        compiled=job.compile.compiles_layers,
    )


def first_names(config: ModelConfig) -> dict[str, str]:
    """Returns, for each further copy of a tied parameter, the name of its first copy."""
    return {copy: first for first, *copies in tied_weights(config) for copy in copies}


def _pipeline_ends(job: JobConfig, meshes: Meshes, num_stages: int) -> tuple[int, int]:
    """The ranks, in the world, that hold this pipeline's first and last stage."""
    ranks = dist.get_process_group_ranks(meshes.group("pp"))
    of_the_first = stages_of_rank(schedule_of(job.parallelism), 0, len(ranks), num_stages)
    return ranks[0], ranks[0] if num_stages - 1 in of_the_first else ranks[-1]


class Parts(NamedTuple):
    """Holds a rank's part of a model, on the meta device."""

    parts: list[Decoder]
    partial: dict[str, set[str]]
    """Names of parameters whose gradients are still to be summed over an axis, by axis."""
    names: list[str]
    """Every parameter of the whole model."""
    stages: list[list[str]]
    """The modules of each stage of the pipeline; of one without a pipeline."""
    accumulation: Accumulation
    """Sharing of gathered parameters and reductions between the microbatches of a step."""


def lay_out(
    job: JobConfig,
    config: ModelConfig,
    meshes: Meshes,
    device: torch.device,
    ranks_per_node: int | None = None,
) -> Parts:
    """Steps 2 to 6 of `build_sharded_model`: a model cut to this rank's part of it.

    Needs no memory for the model and exchanges nothing, so that a fake world of any size will do.
    `device` is where the model will run.
    """
    # 2. The plain model, without memory, and the stages of it that this rank holds.
    plain = _plain_model(job, config, *_cores(job, config, meshes, device))
    copies = first_names(config)
    names = [name for name, _ in plain.named_parameters() if name not in copies]
    stages = _stages(job, config)
    parts = _own_parts(plain, stages, job, meshes)

    accumulation = choose_accumulation(
        Setup(job, config, meshes.dims.world_size), memory_of(device)
    )
    policy = sharding_policy(job, accumulation.word, device)
    partly: dict[str, set[str]] = {"tp": set(), "etp": set()}
    dispatch = dispatch_options(job.parallelism, config, meshes, ranks_per_node)
    for part in parts:
        # 3. What multiplies in low precision, while every weight is whole.
        if found := quantize(part, job.model.converters, job.quantize):
            words = ", ".join(job.model.converters), len(found), found[0], found[-1]
            logger.info("%s: %d Linear and MoE layers, %s to %s", *words)

        # 4. Experts to their ranks, before anything else looks at parameters; then heads and
        # hidden dims, and losses that ask for whole sequences.
        moe_layers = list(part.moe_layers().values())
        apply_expert_parallel(moe_layers, meshes, dispatch)
        partly["etp"] |= partial_over_etp(part, meshes)
        partly["tp"] |= apply_tensor_parallel(part, TENSOR_PLAN, meshes)
        join_sequences(moe_layers, meshes)
        freeze(part, job.training, job.lora)

        # 5. Compiled blocks inside recomputation, which runs them twice; both inside FSDP's hooks,
        # so that a recomputed block finds its gathered parameters.
        recompute = job.activation_checkpoint
        pipelines_tp = job.parallelism.enable_async_tensor_parallel and device.type == "cuda"
        apply_compile(
            part.blocks().values(),
            job.compile,
            recompute,
            eager_routing=bool(job.debug.routing_record or job.debug.routing_replay),
            pipelined_tp=meshes.group("tp") if pipelines_tp and meshes.dims.tp > 1 else None,
        )
        apply_activation_checkpoint(part, recompute, compiled=job.compile.compiles_layers)
        _choose_loss(part.output, job, meshes, device)

        # 6. Data parallelism over all of it.
        apply_fsdp(part, stage_units(part), meshes, policy, wide_units(part))
    return Parts(parts, partly, names, stages, accumulation)


def _choose_loss(output: nn.Module, job: JobConfig, meshes: Meshes, device: torch.device) -> None:
    """Sets the cross-entropy of the output layer, if the stage has it, and its tokens per chunk."""
    if not isinstance(output, Output):
        return
    cut = meshes.dims.tp > 1
    loss = VocabParallelCrossEntropy(meshes.group("tp")) if cut else output.cross_entropy
    output.cross_entropy = compile_loss(loss, job.compile, device)
    output.chunk_size = job.training.loss_chunk_size


def _plain_model(
    job: JobConfig, config: ModelConfig, core: AttentionCore, recurrence: RecurrentCore | None
) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config, core, recurrence)
        adapt(model, job.lora)
    # Buffers keep their types: biases of 1e-3. Nothing is added to base weights.
    of_base = stored_dtype(job) if job.lora.rank is None else compute_dtype(job)
    for name, parameter in model.named_parameters():
        stored = stored_dtype(job) if ADAPTER in name else of_base
        parameter.data = parameter.data.to(stored_in(name, stored))
    return model


def _cores(
    job: JobConfig, config: ModelConfig, meshes: Meshes, device: torch.device
) -> tuple[Any, Any]:
    """Returns an AttentionCore, and a RecurrentCore if layers recur, which all layers share."""
    core: Any = _attention_core(job, config, meshes, device)
    recurrence: Any = config.recurrent and _recurrence(job, config.recurrent, meshes, device)
    if recomputes_by_operation(job.activation_checkpoint) and not job.compile.compiles_layers:
        core, recurrence = KeptAttention(core), recurrence and KeptAttention(recurrence)
    return core, recurrence


def _attention_core(
    job: JobConfig, config: ModelConfig, meshes: Meshes, device: torch.device
) -> AttentionCore:
    masked = job.training.mask_documents
    if config.indexer is not None:
        groups = {"tp_group": meshes.group("tp"), "cp_group": meshes.group("cp")}
        balanced = _is_balanced(job.parallelism)
        return sparse_core(**groups, balanced=balanced, mask_documents=masked)
    plain = plain_core(
        config, mask_documents=masked, dtype=compute_dtype(job), device_type=device.type
    )
    if meshes.dims.cp == 1:
        return plain
    return context_parallel_core(
        plain,
        group=meshes.group("cp"),
        method=job.parallelism.context_parallel_rotate_method,
        balanced=_is_balanced(job.parallelism),
        mask_documents=masked,
        takes_flex=takes_flex(config, compute_dtype(job), device.type),
    )


def _recurrence(
    job: JobConfig, config: GatedDeltaConfig, meshes: Meshes, device: torch.device
) -> RecurrentCore:
    rule = choose_rule(device.type, compute_dtype(job), config.key_dim)
    masked = job.training.mask_documents
    if meshes.dims.cp == 1:
        return Recurrence(rule, mask_documents=masked)
    balanced = _is_balanced(job.parallelism)
    return SegmentedRecurrence(rule, meshes.group("cp"), balanced=balanced, mask_documents=masked)


def _positions(parallelism: Parallelism, meshes: Meshes) -> Positions:
    rank, size = meshes.dims.coordinate(meshes.rank, "cp"), meshes.dims.cp
    balanced = size > 1 and _is_balanced(parallelism)
    return cache(partial(local_positions, cp_size=size, cp_rank=rank, balanced=balanced))


def _is_balanced(parallelism: Parallelism) -> bool:
    return parallelism.context_parallel_load_balancer == "headtail"


def _stages(job: JobConfig, config: ModelConfig) -> list[list[str]]:
    if job.parallelism.pipeline_parallel_degree == 1:
        return [module_names(config.num_layers)]
    flops = part_flops(config, job.training.seq_len)
    return model_parts(job.parallelism, flops, config.num_layers)


def _own_parts(
    plain: Decoder, stages: list[list[str]], job: JobConfig, meshes: Meshes
) -> list[Decoder]:
    dims = meshes.dims
    if dims.pp == 1:
        return [plain]
    schedule = schedule_of(job.parallelism)
    own = stages_of_rank(schedule, dims.coordinate(meshes.rank, "pp"), dims.pp, len(stages))
    return [
        keep_only(_plain_model(job, plain.config, plain.core, plain.recurrence), stages[stage])
        for stage in own
    ]


def _execution(
    parts: list[Decoder],
    job: JobConfig,
    config: ModelConfig,
    meshes: Meshes,
    device: torch.device,
    accumulation: str,
) -> Execution:
    if meshes.dims.pp == 1:
        offloads = job.training.enable_cpu_offload
        sync = StepSync(parts[0], meshes, accumulation, cpu_offload=offloads)
        return WholeModel(parts[0], sync)
    from titan_moe.distributed.pipeline.schedule import Pipeline

    return Pipeline(
        list(parts),
        meshes=meshes,
        parallelism=job.parallelism,
        dim=config.dim,
        dtype=compute_dtype(job),
        device=device,
    )
