"""What a run shows of itself, and how it is made to repeat: profiling, metrics, debug."""

from pydantic import Field, NonNegativeInt, PositiveInt

from titan_moe.config.section import Section


class Profiling(Section):
    """torch.profiler traces."""

    enable_profiling: bool = False
    """Write a trace every profile_freq steps."""
    save_traces_folder: str = "profile_traces"
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
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the memory snapshots, inside job.dump_folder."""


class Metrics(Section):
    """What is logged, how often, and where to. metrics.jsonl and the console are always on."""

    log_freq: PositiveInt = 10
    """Steps from one logged step to the next; the first and the last step are always logged."""
    enable_tensorboard: bool = False
    """Also write TensorBoard events."""
    save_tb_folder: str = "tb"
    """Folder of the TensorBoard events, inside job.dump_folder."""
    disable_color_printing: bool = False
    """Plain text even on a terminal."""
    enable_wandb: bool = False
    """Also log to Weights & Biases, when its package is installed."""
    log_expert_counts: bool = False
    """Write the rows of every expert at each logged step, to expert_counts.jsonl."""
    log_parameter_norms: bool = False
    """Write the norm of every parameter's and expert's gradient at each logged step, to
    parameter_norms.jsonl."""


class Debug(Section):
    """Reproducibility and benchmarks."""

    seed: int = 0
    """Initial weights and data order follow from it alone."""
    deterministic: bool = False
    """Deterministic kernels only."""
    deterministic_warn_only: bool = False
    """Warn instead of failing where no deterministic kernel exists."""
    moe_force_load_balance: bool = False
    """Spread tokens evenly over experts regardless of the router (benchmarks only)."""
    permute_rows: NonNegativeInt = 0
    """Seed of an order of each global batch's rows, so that the ranks and microbatches that add
    them up change and nothing else does: how much rounding alone may do. 0: as they come."""
    routing_record: str | None = None
    """Folder to write every step's chosen experts and their weights to."""
    routing_record_gb: float = Field(4.0, gt=0)
    """Size of a rank's files at which all ranks stop recording."""
    routing_replay: str | None = None
    """Folder of a routing_record whose experts every token goes to, in whatever layout."""
    capture_step: NonNegativeInt = 0
    """The step of which to write a summary of every tensor, to capture/ in job.dump_folder, for
    titan-moe verify localize; 0: none."""
