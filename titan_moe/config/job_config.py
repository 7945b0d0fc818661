"""Every TOML table, one class each; a field's docstring is its `--help` text and its schema
description.

Names, meanings and (unless the docstring says otherwise) defaults are those of torchtitan 0.2, so
that its users can bring their files; torchtitan.py says what becomes of its other keys.
"""

from collections.abc import Mapping
from datetime import date
from math import prod
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from titan_moe.config.named import as_path
from titan_moe.config.plugins import AS_IT_IS, registered


def _not_zero(value: int) -> int:
    if value == -1 or value > 0:
        return value
    raise ValueError("must be -1 or at least 1")


_Unlimited = Annotated[int, AfterValidator(_not_zero)]
READ = "names what a training reads"
_Path = Annotated[str, AfterValidator(as_path)]
"""A file or folder; ~ is the home folder."""
_ReadPath = Annotated[str, AfterValidator(as_path), READ]
_MOST = 10**9
"""The largest whole number of all keys but debug.seed: more steps, seconds or sequences than any
run has, and few enough for every type that they are converted to."""


Score = Annotated[
    Literal["softmax", "sigmoid", "sqrtsoftplus"],
    registered("titan_moe.moe.router:SCORES"),
    AS_IT_IS,
]


def _day(value: str) -> str:
    return date.fromisoformat(value).isoformat()


def _name_or_flag(value: Any) -> Any:
    if value in ("true", "false"):  # A command line has text alone.
        return value == "true"
    if isinstance(value, bool) or (isinstance(value, str) and value):
        return value
    raise ValueError("must be true, false or the name of a token")


def _targets(value: Any) -> Any:
    is_list = isinstance(value, list) and value
    if value in ("assistant", "last", "all") or (
        is_list and all(isinstance(n, str) for n in value)
    ):
        return value
    raise ValueError("must be 'assistant', 'last', 'all' or a list of roles")


class Section(BaseModel):
    """A frozen table that knows its keys and no others."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @field_validator("*")
    @classmethod
    def _in_range(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int) and abs(value) > _MOST and info.field_name != "seed":
            raise ValueError(f"must be at most {_MOST}")
        return value


class Job(Section):
    """Output folder of a run, and what it prints first."""

    dump_folder: _Path = Field("./outputs", min_length=1)
    """Folder of everything the run writes: config.toml, metrics.jsonl, checkpoints; ~ is the home
    folder, here as in every other path."""
    description: str = "titan_moe run"
    """Free text, logged at start."""
    print_config: bool = False
    """Print the resolved configuration at start."""
    imports: list[str] = Field([])
    """Python modules, imported first, that register schedules, dispatchers, scores, kinds of data
    or metrics of their own."""


class Profiling(Section):
    """torch.profiler traces."""

    enable_profiling: bool = False
    """Write a trace every profile_freq steps."""
    save_traces_folder: _Path = "profile_traces"
    """Folder of the traces, inside job.dump_folder."""
    profile_freq: PositiveInt = 10
    """Steps from one trace to the next."""
    profiler_active: PositiveInt = 1
    """Steps that one trace covers."""
    profiler_warmup: NonNegativeInt = 3
    """Steps the profiler runs without recording before each trace."""
    enable_memory_snapshot: bool = False
    """Write what CUDA's allocator holds, and who asked for it, every profile_freq steps and when
    memory runs out. For https://pytorch.org/memory_viz; refused without a GPU."""
    save_memory_snapshot_folder: _Path = "memory_snapshot"
    """Folder of the memory snapshots, inside job.dump_folder."""


class Metrics(Section):
    """Logged values, how often, and where to. metrics.jsonl and the console are always on."""

    log_freq: PositiveInt = 10
    """Steps from one logged step to the next; the first and the last step are always logged."""
    enable_tensorboard: bool = False
    """Also write TensorBoard events."""
    save_tb_folder: _Path = "tb"
    """Folder of the TensorBoard events, inside job.dump_folder."""
    enable_wandb: bool = False
    """Also log to Weights & Biases (pip install 'titan_moe[wandb]'); WANDB_MODE=offline needs no
    network."""
    enable_mlflow: bool = False
    """Also log to MLflow (pip install 'titan_moe[mlflow]'), at MLFLOW_TRACKING_URI or, without it,
    in the folder mlruns inside job.dump_folder."""
    log_expert_counts: bool = False
    """Write the rows of every expert at each logged step, to expert_counts.jsonl."""
    log_initial_weights: bool = False
    """Write a checksum of every tensor before the first step, the same in any layout, to
    initial_weights.json."""
    log_parameter_norms: bool = False
    """Write the norm of every parameter's and expert's gradient at each logged step, to
    parameter_norms.jsonl."""
    replica_check_freq: NonNegativeInt = 0
    """Steps from one comparison of what several ranks hold alike (parameters, router biases,
    optimizer state, copies of tied weights) to the next: bits that differ stop the run, and name
    tensors and ranks. 0: never."""


class Model(Section):
    """The network, and the tokenizer that its vocabulary belongs to."""

    name: str = "deepseek_v3"
    """Model family: a folder of titan_moe/models."""
    flavor: str = "debugmodel"
    """Named dimensions of that family; 'hf': those of hf_assets_path/config.json."""
    hf_assets_path: _ReadPath | None = None
    """A Hugging Face folder of this model: flavor 'hf' takes its dimensions, the tokenizer is read
    from it unless tokenizer_path says otherwise, and exports take along what is beside its
    weights."""
    tokenizer_path: _ReadPath = "bytes"
    """'bytes', or a folder with tokenizer_config.json and one of tokenizer.json, tiktoken.model,
    tekken.json and tokenizer.model, or one of these files; left out: hf_assets_path if that is
    set."""
    converters: list[
        Literal["quantize.linear.float8", "quantize.grouped_mm.float8", "quantize.grouped_mm.mx"]
    ] = Field([])
    """Products in low precision, by the names of the tables that say how: Linear layers, routed
    experts in one of two ways, or both."""
    num_mtp_layers: NonNegativeInt | None = None
    """Layers of multi-token prediction (arXiv 2412.19437, section 2.2); left out: the flavor's."""

    @model_validator(mode="before")
    @classmethod
    def _tokenizer_of_assets(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "tokenizer_path" in values:
            return values
        assets = values.get("hf_assets_path")
        return values if assets is None else values | {"tokenizer_path": assets}


class Moe(Section):
    """Mixture-of-experts settings. A speed or weight left out takes the flavor's own value."""

    score: Score | None = None
    """Function of the router's logits; left out: the flavor's."""
    row_alignment: Literal[1, 8, 16, 32, 64, 128] | None = None
    """Each expert's rows are padded to a multiple of this before the grouped GEMM (float8 16, mxfp8
    32); above 1 an expert without rows gets a block too. Left out: 1, but for bfloat16 8 on a GPU,
    and 128 on a CPU, where every new number of rows costs time and memory for a kernel of its
    own."""
    bias_update: Literal["sign", "quantile"] | None = None
    """Rule that moves the routing bias: 'sign' by bias_update_speed towards an even load,
    'quantile' to where the step's tokens would have been even (kexue.fm/archives/11619)."""
    bias_momentum: float | None = Field(None, ge=0, lt=1)
    """Share of the old bias in the new one, for 'quantile'; left out: 0."""
    bias_update_speed: NonNegativeFloat | None = None
    """Step of the aux-loss-free routing bias per optimizer step (arXiv 2408.15664); 0 switches
    it off."""
    sequence_aux_loss_weight: NonNegativeFloat | None = None
    """Weight of the sequence-wise load-balance loss (arXiv 2412.19437, section 2.1.2)."""
    global_aux_loss_weight: NonNegativeFloat | None = None
    """Weight of the global-batch load-balance loss; its frequencies are the previous step's
    counts."""
    z_loss_weight: NonNegativeFloat | None = None
    """Weight of the router z-loss (arXiv 2202.08906)."""


class OptimizerGroup(Section):
    """Sets other values for some parameters; norms and biases take no weight decay here either."""

    pattern: str
    """A name, or a part of one between dots, such as "router"; or with wildcards, as
    "layers.1?.*". The first group that matches a parameter holds for it."""
    lr: NonNegativeFloat | None = None
    """Peak learning rate; left out: optimizer.lr."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay; left out: optimizer.weight_decay."""


class Optimizer(Section):
    """The optimizer. Norms and biases take no weight decay."""

    name: Literal["AdamW", "Adam", "Muon"] = "AdamW"
    """AdamW decays weights directly; Adam adds the decay to the gradient; Muon makes the momentum
    of layers' matrices orthogonal, and is AdamW for embeddings, output, routers, norms and biases.
    """
    lr: NonNegativeFloat = 8e-4
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay per unit of learning rate."""
    groups: list[OptimizerGroup] = Field([])
    """Other rates and decays by name, as [[optimizer.groups]] tables."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """Implementation of Adam's update in torch."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the stored moments. 'float32': that of the parameters (training.dtype); 'bfloat16':
    half the memory, each rounded to nearest after an update in the parameters' type."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """Muon's decay of the momentum, which is Nesterov's."""
    muon_steps: PositiveInt = 5
    """Newton-Schulz steps."""
    muon_dtype: Literal["auto", "bfloat16", "stored"] = "auto"
    """Type of the Newton-Schulz steps: 'bfloat16', which the matrices then also travel in;
    'stored', that of the parameters (training.dtype); or 'auto', bfloat16 for parameters in float32
    on a GPU."""
    muon_rms: float = Field(0.2, gt=0)
    """Root mean square of an update by Muon in learning rates; 0.2 is about AdamW's."""


_ADAM_KEYS = ("beta1", "beta2", "eps", "implementation", "state_dtype")
OPTIMIZER_KEYS = {
    "AdamW": _ADAM_KEYS,
    "Adam": _ADAM_KEYS,
    "Muon": (*_ADAM_KEYS, "muon_momentum", "muon_steps", "muon_dtype", "muon_rms"),
}
"""The keys that each optimizer reads, besides lr and weight_decay, which all read. A note names the
others that are set."""


class LRScheduler(Section):
    """Warmup, stable, decay."""

    warmup_steps: NonNegativeInt = 200
    """Steps of linear warm-up from 0."""
    total_steps: PositiveInt | None = None
    """Steps the schedule is laid out over; left out: training.steps."""
    decay_ratio: float | None = Field(None, ge=0, le=1)
    """Share of the schedule that decays; left out: everything after the warm-up."""
    decay_type: Annotated[
        Literal["linear", "sqrt", "cosine", "inverse_sqrt"],
        registered("titan_moe.optim.schedules:DECAYS"),
        AS_IT_IS,
    ] = "linear"
    """Shape of the decay. inverse_sqrt falls with 1 / sqrt(step) from the end of the warm-up, or of
    the stable stretch before the decay; it comes near min_lr_factor, but has no last step."""
    min_lr_factor: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a factor of the peak. The last step is taken with it: at 0 that
    step changes no weight."""


DATASETS_WITHOUT_PATH = ("stdlib", "synthetic")
DATASETS_WITHOUT_COLUMNS = (*DATASETS_WITHOUT_PATH, "text", "tokens", "megatron")
LOCAL_DATASETS = (*DATASETS_WITHOUT_COLUMNS, "json", "parquet")
"""Kinds that are not read from the Hugging Face hub."""


class Dataset(Section):
    """One part of a blend."""

    dataset: str
    """Name of the data, as in training.dataset."""
    dataset_path: _ReadPath | None = None
    """Path of the data, as in training.dataset_path."""
    text_column: str | None = None
    """Column that holds the text; left out: training.text_column."""
    weight: float = Field(1.0, gt=0)
    """Share of the tokens drawn from this part, relative to the other parts' weights."""


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685): the weights that the run begins with are frozen, in
    the type of products, and a pair of small matrices beside each is trained. Checkpoints hold
    adapters alone."""

    rank: PositiveInt | None = None
    """Rank of the adapters; left out: none, all weights train."""
    alpha: PositiveFloat = 32.0
    """An adapter's product is multiplied by alpha / rank."""
    rank_stabilised: bool = False
    """Multiply by alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    targets: list[str] = Field(
        ["attention", "feed_forward", "shared_experts", "experts"], min_length=1
    )
    """Layers with an adapter, by patterns as in training.freeze. Routers, embeddings, the output
    layer and indexers have none."""
    initial_load_path: _ReadPath | None = None
    """A PEFT folder of the same rank and factor that the adapters begin with; left out: they change
    nothing at first."""

    @property
    def scale(self) -> float:
        """The factor of the adapters' products."""
        assert self.rank is not None
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)


class DataLoader(Section):
    """Reading ahead of the step."""

    prefetch_factor: PositiveInt = 2
    """Steps' worth of batches that the background reader keeps ready."""


def _variables(table: Any) -> Any:
    """A template's variables, of which a command line gives texts."""
    flags = {"true": True, "false": False}
    read = table.items() if isinstance(table, dict) else ()
    return {name: flags.get(value, value) for name, value in read} or table


class Messages(Section):
    """Conversations as training data, of training.dataset_format = "messages"."""

    template: _ReadPath | None = None
    """File of a chat template in Jinja, or 'chatml'; left out: the tokenizer's own. What it puts
    into {% generation %} is what the assistant writes; without that the turns are found by
    rendering the conversation up to each of them."""
    date: Annotated[str, AfterValidator(_day)] | None = None
    """Day that a template is told when it asks for today's, such as "2026-01-31": a run that
    resumes must read the same tokens."""
    targets: Annotated[
        Literal["assistant", "last", "all"] | list[str], BeforeValidator(_targets)
    ] = "assistant"
    """Tokens to learn: what the assistant writes, its last turn alone, everything, or a list of
    roles, such as ["assistant", "tool"]: of others than the assistant the contents and ends of
    turns, without headers. A message whose `weight`, `loss`, `train`, `trainable`, `training` or
    `loss_mask` is 0 or false is not learned."""
    too_long: Literal["cut", "drop"] = "cut"
    """A conversation of more than seq_len tokens loses its end, or is left out."""
    template_kwargs: Annotated[dict[str, bool | int | str], BeforeValidator(_variables)] = Field({})
    """Variables of the template, such as {enable_thinking = false}; those in a record's
    chat_template_kwargs go before."""
    may_leave_out: list[Literal["contents", "calls", "tools", "thoughts"]] = Field([])
    """Parts of a conversation that the template may leave out of its text. A conversation that
    loses others is refused. Thoughts that it writes in a last turn alone are no loss."""
    max_refused: float = Field(0.01, ge=0, le=1)
    """Largest share of a source's conversations that may be refused, and left out, before the run
    stops: records of another form, unknown roles, what the template refuses or leaves out."""


class Training(Section):
    """Data, batch, steps, precision."""

    dataset: str = "stdlib"
    """'stdlib' (the Python sources on this machine), 'synthetic', 'json', 'parquet', 'text',
    'tokens' (a folder made by titan-moe tokenize), 'megatron' (pairs of .bin and .idx files of
    Megatron-LM), 'c4', 'c4_validation', 'c4_test' (a folder of torchtitan's repository), or a
    Hugging Face dataset name (owner/name:configuration@revision).
    A document is a file of stdlib, a record of json and parquet, a paragraph of text."""
    dataset_path: _ReadPath | None = None
    """File, folder or glob for json, parquet and text; a folder for tokens; a folder, or NAME of
    NAME.bin and NAME.idx, for megatron; a local copy for Hugging Face names."""
    text_column: str = "text"
    """Column of json, parquet and Hugging Face data that holds the text; 'doc.text' is the field
    text of records under doc. No other column is read."""
    dataset_format: Literal["text", "messages"] = "text"
    """Content of a document: 'text', or 'messages', a conversation for supervised fine-tuning. Its
    record has `messages` (and `tools`), `conversations`, or `prompt` and `completion`."""
    messages: Messages = Messages()
    blend: list[Dataset] = Field([])
    """Several datasets with weights, as [[training.blend]] tables; replaces dataset and
    dataset_path."""
    repeat_dataset: bool = False
    """Start the dataset again when a sequence of the batch has used up its documents, instead of
    stopping with an error."""
    append_eos: Annotated[bool | str, BeforeValidator(_name_or_flag)] = True
    """A document ends with the tokenizer's end of text: its eos_token, or the base model's where an
    instruct tokenizer's eos_token ends a turn of a chat. A token's name: with that one; false: with
    none."""
    prepend_bos: bool | None = None
    """A document begins with the tokenizer's bos_token. Left out: as add_bos_token in
    tokenizer_config.json says; where it says nothing, as tokenizer.json does with a text."""
    parse_special_tokens: bool = False
    """Names of special tokens inside documents are read as these tokens, no longer as text. Trust
    the documents then: each can end itself."""
    mask_documents: bool = True
    """Packed documents do not attend to each other, and no target crosses from one to the next."""
    local_batch_size: PositiveInt = 8
    """Sequences of one microbatch on one data rank; with a pipeline, of one run of its schedule."""
    global_batch_size: _Unlimited = -1
    """Sequences of one optimizer step over all data ranks; -1: local_batch_size times the data
    ranks."""
    seq_len: PositiveInt = 2048
    """Tokens of one sequence."""
    max_norm: float = Field(1.0, gt=0, allow_inf_nan=True)
    """Gradients are scaled down to this 2-norm; inf switches clipping off."""
    loss_chunk_size: NonNegativeInt | None = None
    """Most tokens of a rank whose logits exist at once, with their gradients: the loss is computed
    in chunks; 0: of a whole microbatch. Left out: 4,096 on a GPU, where gradients take the logits'
    place, and 1,024 on a CPU."""
    mtp_loss_weight: NonNegativeFloat | None = None
    """Weight of the mean over depths of multi-token prediction's losses, each a sum divided by the
    number of the model's own target tokens; left out: the flavor's."""
    freeze: list[str] = Field([])
    """Frozen parameters, by patterns: a name, or a part of one between dots, such as "router";
    or with wildcards, as "*.experts.*". A tied weight has the names of all its copies, but is not
    meant by the name of a block that holds one, such as "mtp". They have no gradients and no
    optimizer state, and the bias of a frozen router stays as it is."""
    indexer_stage: Literal["dense", "sparse"] = "sparse"
    """Stage of sparse attention: 'dense' warms indexers up, which learn from attention to all keys
    while other weights and routing biases are frozen; 'sparse' trains everything on the selected
    keys."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Response to a loss or gradient that is not finite: 'stop' with the last good state, or 'skip'
    the update. Decisions are logged, and kept in events.jsonl."""
    spike_factor: float | None = Field(None, gt=1)
    """A step whose gradient norm, before clipping, is more than so many times the median of the
    last 64 steps' is a spike; judged from the 17th step on. Left out: no step is."""
    on_spike: Literal["stop", "skip"] = "stop"
    """Response to a spike, with the values of on_nonfinite."""
    steps: PositiveInt = 10000
    """Optimizer steps of the run."""
    epochs: PositiveInt | None = None
    """Passes over the conversations after which the run ends, if `steps` does not end it before:
    each conversation is read so many times."""
    stop_timeout_seconds: PositiveInt = 300
    """Longest time that a run may take to stop and save after SIGTERM or SIGUSR1; it is then ended
    as it is."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory (CUDA only)."""
    dtype: Literal["bfloat16", "float32", "float64"] = "float32"
    """Type of the stored parameters; float64 computes and reduces in float64 too (verification)."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Type that forward and backward compute in. Left out on a CPU without bfloat16 units, a run
    takes float32 and says so."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type of gradient reductions."""
    gc_freq: PositiveInt = 50
    """Steps from one garbage collection to the next, taken by all ranks in the same step."""
    dataloader: DataLoader = DataLoader()


class Parallelism(Section):
    """Degrees of the mesh axes. The product pp x dp_replicate x dp_shard x cp x tp is the number
    of ranks."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Replicas of the sharded model (HSDP); plain data parallel when it is the only degree above
    1."""
    data_parallel_shard_degree: _Unlimited = -1
    """Ranks that shard parameters (FSDP2); -1: the rest."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after the forward; 'default' does, but for the output layer, and not
    in a pipeline, which would gather them for every microbatch; schedules that split the backward
    never do."""
    fsdp_accumulation: Literal["auto", "reduce_each", "keep_unsharded", "keep_gathered"] = "auto"
    """Sharing among the microbatches of a step: 'reduce_each' none, 'keep_gathered' the gathered
    parameters and one reduction of their gradients, 'keep_unsharded' the same for parameters that
    no other rank shards, such as experts with edp 1. 'auto': on a GPU the last of these for which
    the memory estimate leaves 4 GiB, on a CPU 'reduce_each'; a pipeline's schedule gathers and
    reduces once a run."""
    tensor_parallel_degree: PositiveInt = 1
    """Ranks that split attention heads, hidden dims and the vocabulary, and between layers the
    sequence."""
    enable_async_tensor_parallel: bool = False
    """Hide tensor parallelism's collectives behind the products next to them, part by part, through
    memory that its GPUs read from each other: torch's micro-pipeline pass, for compiled layers on
    GPUs. Not seen on hardware yet."""
    context_parallel_degree: PositiveInt = 1
    """Ranks that split the sequence."""
    context_parallel_rotate_method: Literal["allgather", "ulysses", "ring"] = "allgather"
    """Exchange by which attention sees whole sequences: 'allgather' of keys and values, 'ulysses'
    (all-to-all over heads), or 'ring' (keys and values pass from rank to rank)."""
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
    pipeline_parallel_expert_parallel_overlap: bool = True
    """With DualPipeV and experts split over ranks: run the forward and the backward that the
    schedule pairs beside each other, so that one computes while the other's tokens travel. The
    numbers are the same."""
    pipeline_parallel_microbatch_size: PositiveInt = 1
    """Sequences of one microbatch of the schedule; training.local_batch_size is a multiple."""
    pipeline_parallel_layers_per_stage: PositiveInt | None = None
    """Sets the number of stages: all layers divided by this, rounded up; they are then of equal
    weight, so a stage may hold a layer more. Left out: as few stages as the schedule wants."""
    pipeline_parallel_first_stage_less_layers: NonNegativeInt | None = None
    """The embedding counts as this many layers; left out: by its own weight."""
    pipeline_parallel_last_stage_less_layers: NonNegativeInt | None = None
    """Norm and output count as this many layers; left out: by their own weight."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """The modules of each stage, in order, such as [["tok_embeddings", "layers.0"], ["layers.1",
    "norm", "output"]]; left out: split by weight."""
    expert_parallel_degree: PositiveInt = 1
    """Ranks that split the experts; taken from dp_shard x cp x tp."""
    expert_tensor_parallel_degree: PositiveInt = 1
    """Ranks that split each expert's hidden dim; taken from dp_shard x cp x tp."""
    expert_parallel_comm_backend: Annotated[
        Literal["auto", "standard", "deduplicated", "balanced", "symmetric"],
        registered("titan_moe.distributed.expert_parallel:DISPATCHERS"),
        AS_IT_IS,
    ] = "auto"
    """Dispatcher of tokens over the ep axis: 'standard' sends one row to each expert of a token,
    'deduplicated' one to each rank, and between nodes one to each node. 'auto' is 'deduplicated'
    from 8 ranks on where it sends at most 1/1.2 of the rows, and else 'standard'; the run's first
    lines say which. 'balanced' is 'standard' between ranks that lend each other experts, so that
    all compute as many rows. 'symmetric' is 'standard' through NVSHMEM, of GPUs alone: the host
    waits for no sizes."""
    expert_parallel_overlap: bool = False
    """Send each microbatch's tokens to their experts in two halves, of which one travels while the
    experts compute the other; balance losses stay those of the whole."""
    expert_parallel_ranks_per_node: PositiveInt | None = None
    """Ranks of a node, for 'deduplicated' and 'auto'; left out: as many as torchrun started on this
    one."""
    expert_parallel_capacity_factor: PositiveFloat | None = None
    """Rows of the buffer from one rank to another, as a multiple of an even share (tokens x top_k /
    expert_parallel_degree): the host waits for no sizes. Left out: exact sizes, at one wait a
    layer. With 'symmetric': rows of the buffer from all ranks together, as a multiple of tokens x
    top_k; left out: as many as can come."""
    expert_parallel_overflow: Literal["stop", "drop"] = "stop"
    """Response to a full buffer: 'stop' before the update, or 'drop' a token's least wanted experts
    and report the share."""

    @property
    def degrees(self) -> dict[str, int]:
        """The size of each mesh axis that has a key; that of dp_shard may be -1."""
        return {axis: getattr(self, key) for axis, key in DEGREES.items()}

    def shard_degree(self, world_size: int) -> int | None:
        """Returns the size of dp_shard as `shard_degree` does."""
        return shard_degree(self.degrees, world_size)

    def data_ranks(self, world_size: int) -> int | None:
        """Returns the number of ranks that read different sequences; None as `shard_degree`."""
        shard = self.shard_degree(world_size)
        return shard and self.data_parallel_replicate_degree * shard


DEGREES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
}
"""Mesh axis -> the key of its size."""


def shard_degree(degrees: Mapping[str, int], world_size: int) -> int | None:
    """Returns the size of dp_shard, where -1 takes the rest of the ranks. None if
    pp x dp_replicate x dp_shard x cp x tp is not the number of ranks."""
    rest, left = divmod(world_size, prod(degrees[a] for a in ("pp", "dp_replicate", "cp", "tp")))
    return rest if rest and not left and degrees["dp_shard"] in (-1, rest) else None


class TrainingStage(Section):
    """Changes from a step of the run on, as [[stages]] tables in the order of their steps. A stage
    begins with all that the stage before it had, and changes what it names. The tensors move to the
    new layout in memory, and the data goes on where it was."""

    from_step: int = Field(gt=1)
    """The first step of the stage, at most training.steps."""
    seq_len: PositiveInt | None = None
    """Tokens of one sequence. Each sequence goes on behind the token that it read last."""
    local_batch_size: PositiveInt | None = None
    """Sequences of one microbatch, as in training.local_batch_size."""
    global_batch_size: PositiveInt | None = None
    """Sequences of one optimizer step over all data ranks; left out, it stays as it is, whatever
    the layout. If it changes, new sequences begin after the last document that was begun, and the
    rest of the old ones is not read."""
    parallelism: Parallelism = Field(default_factory=Parallelism)
    """The keys of the table parallelism that change; the others stay as they are."""

    @field_serializer("parallelism")
    def _changed(self, parallelism: Parallelism) -> dict[str, Any]:
        return parallelism.model_dump(exclude_unset=True, exclude_none=True)


class Checkpoint(Section):
    """Distributed checkpoints."""

    enable: bool = False
    """Save checkpoints, and resume from the latest complete one."""
    folder: _Path = "checkpoint"
    """Folder of the checkpoints, inside job.dump_folder."""
    interval: PositiveInt = 500
    """Steps from one save to the next; the last step is always saved."""
    initial_load_path: _ReadPath | None = None
    """A checkpoint (a step-N folder) to start from when the run has none of its own; with
    initial_load_in_hf a Hugging Face folder."""
    initial_load_model_only: bool = True
    """Take only the model from initial_load_path, not optimizer, step and data position."""
    initial_load_in_hf: bool = False
    """Start from Hugging Face weights (safetensors; float8 and MXFP4 are recognised and
    de-quantised): those of initial_load_path, left out: of model.hf_assets_path."""
    last_save_in_hf: bool = False
    """After the last save, write the model as a Hugging Face folder too: step-N-hf beside it. The
    run waits for it in every async_mode: no step is left that could go on meanwhile."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type of the weights of last_save_in_hf."""
    last_save_model_only: bool = False
    """The last save holds the model only; such a run cannot be resumed (torchtitan's default is
    true)."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """'disabled': a step waits until its checkpoint is on disk; 'async': only until its tensors are
    copied, and a thread of each rank writes them; 'async_with_pinned_mem': the same, with
    page-locked buffers, which a GPU copies to faster. Both want memory for a second state on the
    host. The last save is always waited for."""
    keep_latest_k: NonNegativeInt = 10
    """Checkpoints kept; 0 keeps all."""
    load_step: int = Field(-1, ge=-1)
    """Step to resume from; -1: the latest complete one. Takes effect once in a run's folder: the
    latest checkpoint is continued once a run with it has saved one."""
    exclude_from_loading: list[Literal["model", "optimizer", "train_state", "dataloader"]] = Field(
        []
    )
    """Parts of the checkpoint that keep their fresh values; once, as load_step."""
    enable_first_step_checkpoint: bool = False
    """Save after step 1 too."""
    create_seed_checkpoint: bool = False
    """Write the initial weights as step-0 and stop."""
    load_only: bool = False
    """Load, but never save."""
    save_timeout_seconds: PositiveInt = 1800
    """Longest wait for a save, and for another rank's files. Then the run ends."""

    @property
    def keeps_state(self) -> bool:
        """Returns whether a run can be stopped and resumed."""
        return self.enable and not self.load_only and not self.create_seed_checkpoint


class ActivationCheckpoint(Section):
    """Recompute activations in the backward instead of keeping them."""

    mode: Literal["none", "full", "selective"] = "selective"
    """'full': every layer; 'selective': what selective_ac_option says."""
    selective_ac_option: str = Field("2", pattern="^([1-9][0-9]*|op)$")
    """N: recompute every N-th layer, whole; 'op': recompute every layer but for its matrix
    products, attention, reduce-scatters, all-reduces and all-to-alls, whose results are kept."""
    keep_exchanged_rows: bool = False
    """In layers that are recomputed whole, keep the rows that expert parallelism brought to a
    rank's experts instead of exchanging them again: four exchanges a layer instead of five, for
    the memory of top_k rows of a token (fewer with the deduplicating dispatcher)."""
    keep_attention: bool = False
    """In layers that are recomputed whole, keep the output of torch's attention kernels instead of
    attending again, for the memory of a token's heads. Flex attention attends again."""

    @property
    def by_operation(self) -> bool:
        return self.mode == "selective" and self.selective_ac_option == "op"

    @property
    def every(self) -> int:
        """N, if every N-th layer is recomputed whole; 0 if none is."""
        if self.mode == "selective" and not self.by_operation:
            return int(self.selective_ac_option)
        return int(self.mode == "full")


class Compile(Section):
    """torch.compile, layer by layer."""

    enable: bool = False
    """Compile what `components` names. The first step takes longer; its compile time is logged."""
    components: list[Literal["model", "loss"]] = Field(["model", "loss"])
    """'model': every layer, the experts inside; 'loss': the cross-entropy."""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """'inductor' generates kernels, with Triton on a GPU and a C++ compiler on a CPU; the others
    trace only, to look for mistakes."""

    @property
    def compiles_layers(self) -> bool:
        return self.enable and "model" in self.components


class Float8Linear(Section):
    """Linear layers in float8 (torchao); model.converters switches them on."""

    recipe_name: Literal["rowwise", "rowwise_with_gw_hp", "tensorwise"] = "rowwise"
    """Scales: one for each row or column ('rowwise'), the same but for the weights' gradient, which
    stays in the compute type ('rowwise_with_gw_hp'), or one for each tensor ('tensorwise',
    torchtitan's default)."""
    filter_fqns: list[str] = Field([])
    """Layers with one of these words in their name are left alone, such as "attention". The output
    layer and routers always are, and layers whose sizes are no multiples of 16."""
    emulate: bool = False
    """Round as float8 does but multiply in float32, on any machine; slow, to look at the effect.
    Holds for quantize.grouped_mm.mx too; torchao does not emulate quantize.grouped_mm.float8."""


class Linear(Section):
    """Linear layers."""

    float8: Float8Linear = Float8Linear()


class Float8GroupedMM(Section):
    """Routed experts in float8 (torchao); model.converters switches them on."""

    recipe_name: Literal["rowwise"] = "rowwise"
    """Scales, as in quantize.linear.float8.recipe_name."""
    fqns: list[str] = Field(["experts"])
    """Experts with one of these words in their name (torchtitan's default is none)."""


class MxGroupedMM(Section):
    """Routed experts in mxfp8 (torchao), of GPUs of compute capability 10.0 or more;
    model.converters switches them on."""

    recipe_name: Literal["mxfp8"] = "mxfp8"
    """float8 with a scale, a power of two, for 32 elements along the dim that is summed over."""
    fqns: list[str] = Field(["experts"])
    """Experts with one of these words in their name, as in quantize.grouped_mm.float8."""


class GroupedMM(Section):
    """Routed experts."""

    float8: Float8GroupedMM = Float8GroupedMM()
    mx: MxGroupedMM = MxGroupedMM()


class Quantize(Section):
    """Products in low precision; the keys matter where model.converters names their table."""

    linear: Linear = Linear()
    grouped_mm: GroupedMM = GroupedMM()


class AxisOptions(Section):
    """Options of NCCL for the group of one mesh axis."""

    min_ctas: int | None = Field(None, ge=1, le=32)
    """Fewest thread blocks of a collective. Left out: as NCCL chooses."""
    max_ctas: int | None = Field(None, ge=1, le=32)
    """Most thread blocks of a collective. Left out: as NCCL chooses, or comm.parameter_sms."""
    high_priority: bool | None = None
    """A stream that goes first. Left out: for tokens, not for parameters."""

    @model_validator(mode="after")
    def _in_order(self) -> "AxisOptions":
        if self.min_ctas and self.max_ctas and self.min_ctas > self.max_ctas:
            raise ValueError("min_ctas must be at most max_ctas: choose a smaller one")
        return self


class Comm(Section):
    """Process groups."""

    init_timeout_seconds: PositiveInt = 300
    """Longest wait for a collective until the first step has ended. The run then ends with a report
    of what each rank was doing."""
    train_timeout_seconds: PositiveInt = 100
    """Longest wait for a collective after the first step. Another rank's checkpoint may take
    checkpoint.save_timeout_seconds."""
    trace_buf_size: NonNegativeInt = 2000
    """Number of last collectives that torch's flight recorder keeps on a rank, for the report of a
    hang. 0: none; the report then knows positions and stacks only."""
    save_traces_folder: _Path = "comm_traces"
    """Folder of the reports of hangs, below job.dump_folder."""
    parameter_sms: int | None = Field(None, ge=1, le=32)
    """Multiprocessors of a GPU for each collective of parameters, and left free by matrix products.
    Left out: as many as NCCL wants, and none."""
    axes: dict[
        Literal["pp", "dp_replicate", "fsdp", "cp", "tp", "sequence", "edp", "ep", "etp"],
        AxisOptions,
    ] = Field({})
    """Options of NCCL for the group of a mesh axis, as tables such as [comm.axes.ep] with min_ctas,
    max_ctas and high_priority. Axes of the same ranks then have groups of their own. Not seen on
    NCCL yet."""
    split_communicators: bool = False
    """Split NCCL's communicators off the world's, in which all ranks take part, instead of making
    each anew. Not seen on NCCL yet."""
    separate_reduce_scatter: bool = False
    """Reduce sharded gradients over groups of their own, so that NCCL need not gather the next
    layer's parameters first; the buffers of a communicator more. Not seen on NCCL yet."""
    share_gpus: bool = False
    """Let ranks share GPUs where a machine has fewer of them, to test a layout: collectives then go
    through the host, slowly. No effect where GPUs suffice."""


class Validation(Section):
    """Loss on held-out data."""

    enable: bool = False
    """Measure the validation loss."""
    dataset: str | None = None
    """Name of the data, as in training.dataset; left out: one document in held_out_every of the
    training data, which is then not trained on."""
    held_out_every: int = Field(64, ge=2)
    """One document in so many of the training data is held out for validation."""
    dataset_path: _ReadPath | None = None
    """Path of the data, as in training.dataset_path."""
    text_column: str | None = None
    """Column that holds the text; left out: training.text_column."""
    local_batch_size: PositiveInt = 8
    """Sequences of one batch on one data rank."""
    seq_len: PositiveInt | None = None
    """Tokens of one sequence; left out: training.seq_len."""
    freq: PositiveInt = 10
    """Steps from one validation to the next; the last step always validates."""
    steps: _Unlimited = -1
    """Batches of local_batch_size sequences in one validation, over all ranks; -1: all data."""


class Debug(Section):
    """Reproducibility and benchmarks."""

    seed: int = Field(0, ge=-(2**63), lt=2**63)
    """Initial weights and data order follow from it alone."""
    deterministic: bool = False
    """Deterministic kernels only."""
    deterministic_warn_only: bool = False
    """Warn instead of failing where no deterministic kernel exists."""
    moe_force_load_balance: bool = False
    """Spread tokens evenly over experts regardless of the router (benchmarks only)."""
    router_load: Literal["W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7"] | None = None
    """A workload that says where tokens go in place of the router: even (W0), a hot set of experts
    (W1), a hot rank (W2), a hot expert on each rank (W3), uneven sources (W4), a rank without rows
    (W5), a hot rank that moves (W6) or bursts (W7). See titan_moe/debug/router_load.py."""
    permute_rows: NonNegativeInt = 0
    """Seed of an order of each global batch's sequences, so that the ranks and microbatches that
    add them up change and nothing else does: how much rounding alone may do. 0: as they come."""
    routing_record: _Path | None = None
    """Folder to write every step's chosen experts, and keys of indexers, to; not one that holds
    job.dump_folder."""
    routing_record_gb: float = Field(4.0, gt=0)
    """Size of a rank's files at which all ranks stop recording."""
    routing_replay: _ReadPath | None = None
    """Folder of a routing_record whose choices are repeated, in whatever layout."""
    capture_step: NonNegativeInt = 0
    """The step of which to write a summary of every tensor, to capture/ in job.dump_folder, for
    titan-moe verify localize; 0: none."""

    @property
    def routing(self) -> str | None:
        """The key and value that say where tokens go in place of routers, but a replay's."""
        if self.router_load is not None:
            return f"debug.router_load={self.router_load}"
        return "debug.moe_force_load_balance=true" if self.moe_force_load_balance else None


class JobConfig(Section):
    """A whole run, resolved and frozen."""

    job: Job = Job()
    profiling: Profiling = Profiling()
    metrics: Metrics = Metrics()
    model: Model = Model()
    moe: Moe = Moe()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    lora: Lora = Lora()
    training: Training = Training()
    parallelism: Parallelism = Parallelism()
    stages: list[TrainingStage] = Field([])
    """Steps at which sequence length, batch or layout change."""
    checkpoint: Checkpoint = Checkpoint()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    quantize: Quantize = Quantize()
    comm: Comm = Comm()
    validation: Validation = Validation()
    debug: Debug = Debug()

    def with_values(self, **tables: Mapping[str, Any]) -> "JobConfig":
        """Returns the job with other values of keys, given by table, which are not validated."""
        changed = {
            name: getattr(self, name).model_copy(update=keys) for name, keys in tables.items()
        }
        return self.model_copy(update=changed)
