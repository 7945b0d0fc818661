"""How a model is laid over ranks, and how a rank runs its part."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from titan_moe.config.section import Section


class Parallelism(Section):
    """Degrees of the mesh axes. The product pp x dp_replicate x dp_shard x cp x tp is the number
    of ranks."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Replicas of the sharded model (HSDP); plain data parallel when it is the only degree above
    1."""
    data_parallel_shard_degree: int = -1
    """Ranks that shard parameters (FSDP2); -1: the rest."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after the forward; 'default' does, but for the output layer, and not
    in a pipeline, which would gather them for every microbatch; schedules that split the backward
    never do."""
    tensor_parallel_degree: PositiveInt = 1
    """Ranks that split attention heads, hidden dims and the vocabulary, and between layers the
    sequence."""
    context_parallel_degree: PositiveInt = 1
    """Ranks that split the sequence."""
    context_parallel_rotate_method: Literal["allgather", "ulysses", "ring"] = "allgather"
    """How attention sees the whole sequence: 'allgather' of keys and values, 'ulysses' (all-to-all
    over heads), or 'ring' (keys and values pass from rank to rank)."""
    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"
    """'headtail': rank r holds pieces r and 2 cp - 1 - r of 2 cp, which evens out causal
    attention; 'none': consecutive parts."""
    pipeline_parallel_degree: PositiveInt = 1
    """Ranks that split the layers."""
    pipeline_parallel_schedule: Literal[
        "1F1B",
        "Interleaved1F1B",
        "GPipe",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ] = "1F1B"
    """Order of the forwards and backwards. 1F1B and GPipe have one stage a rank, ZBVZeroBubble and
    DualPipeV two, the others two unless layers_per_stage says otherwise; InterleavedZeroBubble,
    ZBVZeroBubble and DualPipeV split the backward and exclude recompute."""
    pipeline_parallel_microbatch_size: PositiveInt = 1
    """Rows of one microbatch of the schedule; training.local_batch_size is a multiple."""
    pipeline_parallel_layers_per_stage: PositiveInt | None = None
    """Sets the number of stages: all layers divided by this, rounded up; they are then of equal
    weight, so a stage may hold a layer more. Left out: as few stages as the schedule wants."""
    pipeline_parallel_first_stage_less_layers: NonNegativeInt | None = None
    """The embedding counts as this many layers; left out: by its own weight."""
    pipeline_parallel_last_stage_less_layers: NonNegativeInt | None = None
    """Norm and output count as this many layers; left out: by their own weight."""
    pipeline_parallel_expert_parallel_overlap: bool = True
    """DualPipeV computes one chunk while another's rows travel over the ep axis; false: a pair's
    forward runs before its backward. Makes no difference to other schedules, or without experts'
    ranks."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """The modules of each stage, in order, such as [["tok_embeddings", "layers.0"], ["layers.1",
    "norm", "output"]]; left out: split by weight."""
    expert_parallel_degree: PositiveInt = 1
    """Ranks that split the experts; taken from dp_shard x cp x tp."""
    expert_tensor_parallel_degree: PositiveInt = 1
    """Ranks that split each expert's hidden dim; taken from dp_shard x cp x tp."""
    expert_parallel_comm_backend: Literal["standard", "deduplicated"] = "standard"
    """How tokens travel over the ep axis: 'standard' sends one row to each expert of a token,
    'deduplicated' one to each rank, and between nodes one to each node."""
    expert_parallel_ranks_per_node: PositiveInt | None = None
    """Ranks of a node, for 'deduplicated'; left out: as many as torchrun started on this one."""
    expert_parallel_capacity_factor: PositiveFloat | None = None
    """Rows of the buffer from one rank to another, as a multiple of an even share (tokens x top_k /
    expert_parallel_degree): the host waits for no sizes. Left out: exact sizes, at one wait a
    layer."""
    expert_parallel_overflow: Literal["stop", "drop"] = "stop"
    """When a buffer of that size does not suffice: 'stop' before the update, or 'drop' a token's
    least wanted experts and report the share."""


class ActivationCheckpoint(Section):
    """Recompute activations in the backward instead of keeping them."""

    mode: Literal["none", "full", "selective"] = "selective"
    """'full': every layer; 'selective': what selective_ac_option says."""
    selective_ac_option: str = "2"
    """N: recompute every N-th layer, whole; 'op': recompute every layer but for its matrix
    products, attention and collectives, whose results are kept."""


class Compile(Section):
    """torch.compile, layer by layer."""

    enable: bool = False
    """Compile what `components` names. The first step takes longer; its compile time is logged."""
    components: list[Literal["model", "loss"]] = Field(["model", "loss"])
    """'model': every layer, the experts inside; 'loss': the cross-entropy."""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """'inductor' generates kernels, with Triton on a GPU and a C++ compiler on a CPU; the others
    trace only, to look for mistakes."""
