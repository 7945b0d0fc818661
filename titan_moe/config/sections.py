"""One class per TOML table; a field's docstring is its `--help` text and its schema description.

Names, meanings and (unless the docstring says otherwise) defaults are those of torchtitan 0.2, so
that its users can bring their files. What has no equivalent here is refused by name: migration.py.
"""

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from titan_moe.config.section import Section


class Job(Section):
    """Where a run writes and what it prints first."""

    dump_folder: str = "./outputs"
    """Folder of everything the run writes: config.toml, metrics.jsonl, checkpoints, curves."""
    description: str = "titan_moe run"
    """Free text, logged at start."""
    print_config: bool = False
    """Print the resolved configuration at start."""


class Model(Section):
    """Which network, and the tokenizer that its vocabulary belongs to."""

    name: str = "deepseek_v3"
    """Model family: a folder of titan_moe/models."""
    flavor: str = "debugmodel"
    """Named dimensions of that family; 'hf': those of hf_assets_path/config.json."""
    hf_assets_path: str | None = None
    """A Hugging Face folder of this model: flavor 'hf' takes its dimensions, the tokenizer is read
    from it unless tokenizer_path says otherwise, and exports take along what is beside its
    weights."""
    tokenizer_path: str = "bytes"
    """'bytes', a tiktoken BPE file (Llama-3 layout), or a folder that holds a tokenizer.json; left
    out: hf_assets_path if that is set."""
    converters: list[Literal["quantize.linear.float8", "quantize.grouped_mm.float8"]] = Field([])
    """Products in low precision, by the names of the tables that say how: Linear layers, routed
    experts, or both."""
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

    row_alignment: Literal[1, 8, 16, 32, 64, 128] | None = None
    """Each expert's rows are padded to a multiple of this before the grouped GEMM (bf16 1,
    float8 16, mxfp8 32). Left out: 1, but 64 for bfloat16 on a CPU, where every new number of rows
    costs time and memory for a kernel of its own."""
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


class Dataset(Section):
    """One part of a blend."""

    dataset: str
    """As training.dataset."""
    dataset_path: str | None = None
    """As training.dataset_path."""
    weight: float = Field(1.0, gt=0)
    """Share of the rows' tokens drawn from this part, relative to the other parts' weights."""


class DataLoader(Section):
    """Reading ahead of the step."""

    prefetch_factor: PositiveInt = 2
    """Steps' worth of batches that the background reader keeps ready."""


class Training(Section):
    """Data, batch, steps, precision."""

    dataset: str = "stdlib"
    """'stdlib' (the Python sources on this machine), 'synthetic', 'json', 'parquet', 'text',
    'tokens' (a folder made by titan-moe tokenize), 'c4', or a Hugging Face dataset name.
    A document is a file of stdlib, a record of json and parquet, a paragraph of text."""
    dataset_path: str | None = None
    """File, folder or glob for json, parquet, text and tokens; a local copy for Hugging Face
    names."""
    blend: list[Dataset] = Field([])
    """Several datasets with weights, as [[training.blend]] tables; replaces dataset and
    dataset_path."""
    repeat_dataset: bool = False
    """Start the dataset again when a row has used up its documents, instead of stopping with an
    error."""
    mask_documents: bool = True
    """Packed documents do not attend to each other, and no target crosses from one to the next."""
    local_batch_size: PositiveInt = 8
    """Rows of one microbatch on one data rank; with a pipeline, rows of one run of its schedule."""
    global_batch_size: int = -1
    """Rows of one optimizer step over all data ranks; -1: local_batch_size times the data ranks."""
    seq_len: PositiveInt = 2048
    """Tokens of one row."""
    max_norm: float = Field(1.0, gt=0, allow_inf_nan=True)
    """Gradients are scaled down to this norm; inf switches clipping off."""
    norm_type: Literal["2", "inf"] = "2"
    """The norm that is reported and clipped."""
    loss_chunk_size: NonNegativeInt = 1024
    """Most tokens of a rank whose logits exist at once, with their gradients: the loss is computed
    in chunks; 0: of a whole microbatch."""
    mtp_loss_weight: NonNegativeFloat | None = None
    """Weight of the mean of multi-token prediction's losses; left out: the flavor's."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when a loss or a gradient is not finite: stop with the last good state, or skip
    the update."""
    steps: PositiveInt = 10000
    """Optimizer steps of the run."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory (CUDA only)."""
    dtype: Literal["bfloat16", "float32", "float64"] = "float32"
    """Type of the stored parameters; float64 computes and reduces in float64 too (verification)."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Type that forward and backward compute in."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type of gradient reductions."""
    gc_freq: PositiveInt = 50
    """Steps from one garbage collection to the next, taken by all ranks in the same step."""
    dataloader: DataLoader = DataLoader()


class Checkpoint(Section):
    """Distributed checkpoints."""

    enable: bool = False
    """Save checkpoints, and resume from the latest complete one."""
    folder: str = "checkpoint"
    """Folder of the checkpoints, inside job.dump_folder."""
    interval: PositiveInt = 500
    """Steps from one save to the next; the last step is always saved."""
    initial_load_path: str | None = None
    """A checkpoint (a step-N folder) to start from when the run has none of its own; with
    initial_load_in_hf a Hugging Face folder."""
    initial_load_model_only: bool = True
    """Take only the model from initial_load_path, not optimizer, step and data position."""
    initial_load_in_hf: bool = False
    """Start from Hugging Face weights (safetensors; float8 and MXFP4 are recognised and
    de-quantised): those of initial_load_path, left out: of model.hf_assets_path."""
    last_save_in_hf: bool = False
    """After the last save, write the model as a Hugging Face folder too: step-N-hf beside it."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type of the weights of last_save_in_hf."""
    last_save_model_only: bool = False
    """The last save holds the model only; such a run cannot be resumed (torchtitan's default is
    true)."""
    async_mode: Literal["disabled"] = "disabled"
    """Saves happen in the step."""
    keep_latest_k: NonNegativeInt = 10
    """Checkpoints kept; 0 keeps all."""
    load_step: int = -1
    """Step to resume from; -1: the latest complete one."""
    exclude_from_loading: list[Literal["model", "optimizer", "train_state", "dataloader"]] = Field(
        []
    )
    """Parts of the checkpoint that keep their fresh values."""
    enable_first_step_checkpoint: bool = False
    """Save after step 1 too."""
    create_seed_checkpoint: bool = False
    """Write the initial weights as step-0 and stop."""
    load_only: bool = False
    """Load, but never save."""


class Comm(Section):
    """Process groups."""

    init_timeout_seconds: PositiveInt = 300
    """Longest wait for a collective until the first step has ended."""
    train_timeout_seconds: PositiveInt = 100
    """Longest wait for a collective after the first step."""


class Validation(Section):
    """Loss on held-out data."""

    enable: bool = False
    """Measure the validation loss."""
    dataset: str | None = None
    """As training.dataset; left out: the held-out documents of the training data."""
    dataset_path: str | None = None
    """As training.dataset_path."""
    local_batch_size: PositiveInt = 8
    """Rows of one batch on one data rank."""
    seq_len: PositiveInt | None = None
    """Tokens of one row; left out: training.seq_len."""
    freq: PositiveInt = 10
    """Steps from one validation to the next; the last step always validates."""
    steps: int = -1
    """Batches of local_batch_size rows in one validation, over all ranks; -1: all of the data."""
