"""Rules across tables: what no single key can know. One function each; all numbers are named.

Nothing here raises, so that everything wrong is reported at once. A rule that needs the degrees to
fit the number of ranks is silent where they do not: `_ranks` says so. Those of the mesh axes are in
rooms of their own, checks_parallel.py and checks_precision.py.
"""

from collections.abc import Callable
from pathlib import Path

from titan_moe.config.checks.parallel import PARALLEL_RULES
from titan_moe.config.checks.precision import PRECISION_RULES
from titan_moe.config.job_config import JobConfig
from titan_moe.config.sections import Moe
from titan_moe.config.shape import ModelShape, Run, flavor


def check(job: JobConfig, model: ModelShape, world_size: int, *, num_gpus: int) -> list[str]:
    """One line for every broken rule. `num_gpus`: GPUs of this machine; 0 means a CPU run."""
    run = Run(job, model, world_size, num_gpus)
    return [line for rule in _RULES for line in rule(run)]


def check_vocabulary(job: JobConfig, model: ModelShape, tokenizer_size: int) -> list[str]:
    """`tokenizer_size` is the largest token id plus one, special tokens included."""
    if tokenizer_size <= model.vocab_size:
        return []
    return [
        f"model.tokenizer_path={job.model.tokenizer_path}: its {tokenizer_size} tokens do not fit "
        f"vocab_size={model.vocab_size} of {flavor(job)}: choose a smaller tokenizer or another "
        f"flavor"
    ]


def _unlimited_or_positive(run: Run) -> list[str]:
    values = {
        "parallelism.data_parallel_shard_degree": run.job.parallelism.data_parallel_shard_degree,
        "training.global_batch_size": run.job.training.global_batch_size,
        "validation.steps": run.job.validation.steps,
    }
    return [
        f"{key}={value} must be -1 or at least 1"
        for key, value in values.items()
        if value < 1 and value != -1
    ]


def _sequence_length(run: Run) -> list[str]:
    limit = run.model.max_seq_len
    lengths = {
        "training.seq_len": run.job.training.seq_len,
        "validation.seq_len": run.job.validation.seq_len or 0,
    }
    return [
        f"{key}={length} exceeds max_seq_len={limit} of {run.flavor}: choose at most {limit}"
        for key, length in lengths.items()
        if length > limit
    ]


def _memory_snapshot(run: Run) -> list[str]:
    if not run.job.profiling.enable_memory_snapshot or run.num_gpus:
        return []
    return [
        "profiling.enable_memory_snapshot=true: a snapshot is of CUDA's allocator, and this is a "
        "CPU run: leave it out"
    ]


def _further_tokens(run: Run) -> list[str]:
    depths, weight = run.model.num_mtp_layers, run.job.training.mtp_loss_weight
    if not depths:
        return [
            f"training.mtp_loss_weight={weight}: {run.flavor} has no multi-token prediction here; "
            f"leave it out, or set model.num_mtp_layers"
        ] * (weight is not None)
    lengths = {
        "training.seq_len": run.job.training.seq_len,
        "validation.seq_len": run.job.validation.seq_len,
    }
    return [
        f"{key}={length} must be more than the {depths} tokens ahead of model.num_mtp_layers: "
        f"choose at least {depths + 1}, or fewer layers"
        for key, length in lengths.items()
        if length is not None and length <= depths
    ]


def _moe_settings(run: Run) -> list[str]:
    if run.model.moe is not None:
        return []
    given, plain = run.job.moe.model_dump(), Moe().model_dump()
    return [
        f"moe.{key}={value}: {run.flavor} has no experts; leave it out"
        for key, value in given.items()
        if value != plain[key]
    ]


def _cpu_offload(run: Run) -> list[str]:
    if not run.job.training.enable_cpu_offload or run.num_gpus:
        return []
    return ["training.enable_cpu_offload=true needs a CUDA GPU, and none was found: choose false"]


def _precision(run: Run) -> list[str]:
    training = run.job.training
    if (training.dtype, training.mixed_precision_param) != ("bfloat16", "float32"):
        return []
    return [
        "training.mixed_precision_param=float32 cannot restore parameters stored with "
        "training.dtype=bfloat16: choose training.dtype=float32"
    ]


def _recompute(run: Run) -> list[str]:
    every = run.job.activation_checkpoint.selective_ac_option
    selective = run.job.activation_checkpoint.mode == "selective"
    if not selective or every == "op" or (every.isdecimal() and int(every) > 0):
        return []
    return [
        f"activation_checkpoint.selective_ac_option={every!r} must be a positive integer N, to "
        f"recompute every N-th layer, or 'op'"
    ]


def _profiling(run: Run) -> list[str]:
    profiling = run.job.profiling
    needed = profiling.profiler_warmup + profiling.profiler_active
    if not profiling.enable_profiling or profiling.profile_freq >= needed:
        return []
    return [
        f"profiling.profile_freq={profiling.profile_freq} must be at least profiler_warmup "
        f"{profiling.profiler_warmup} + profiler_active {profiling.profiler_active} = {needed}"
    ]


def _checkpoint_enabled(run: Run) -> list[str]:
    checkpoint = run.job.checkpoint
    needing = {
        "create_seed_checkpoint=true": checkpoint.create_seed_checkpoint,
        f"initial_load_path={checkpoint.initial_load_path}": checkpoint.initial_load_path,
        f"load_step={checkpoint.load_step}": checkpoint.load_step != -1,
        "load_only=true": checkpoint.load_only,
        "initial_load_in_hf=true": checkpoint.initial_load_in_hf,
        "last_save_in_hf=true": checkpoint.last_save_in_hf,
    }
    return [
        f"checkpoint.{setting} has no effect without checkpoint.enable=true: set it"
        for setting, is_set in needing.items()
        if is_set and not checkpoint.enable
    ]


def _hugging_face(run: Run) -> list[str]:
    checkpoint, lines = run.job.checkpoint, []
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        lines.append(
            "checkpoint.initial_load_model_only=false: Hugging Face folders hold the model only, "
            "set it to true beside checkpoint.initial_load_in_hf=true"
        )
    if checkpoint.initial_load_in_hf and not (
        checkpoint.initial_load_path or run.job.model.hf_assets_path
    ):
        lines.append(
            "checkpoint.initial_load_in_hf=true needs a folder: set checkpoint.initial_load_path "
            "or model.hf_assets_path"
        )
    if checkpoint.last_save_in_hf and checkpoint.load_only:
        lines.append(
            "checkpoint.last_save_in_hf=true has no effect with checkpoint.load_only=true: choose "
            "one"
        )
    return lines


def _routing_traces(run: Run) -> list[str]:
    debug, lines = run.job.debug, []
    record, replay = debug.routing_record, debug.routing_replay
    named = {"debug.routing_record": record, "debug.routing_replay": replay}
    if run.model.moe is None:
        return [
            f"{key}={folder}: {run.flavor} has no experts; leave it out"
            for key, folder in named.items()
            if folder is not None
        ]
    if record is not None and _has_other_files(Path(record)):
        lines.append(f"debug.routing_record={record} holds other files: choose a new folder")
    if replay is None:
        return lines
    if not (Path(replay) / "record.json").is_file():
        lines.append(
            f"debug.routing_replay={replay} has no record.json: name the folder of a "
            f"debug.routing_record"
        )
    if record is not None and Path(record).resolve() == Path(replay).resolve():
        lines.append(f"debug.routing_record={record} is what is replayed: choose another folder")
    if debug.moe_force_load_balance:
        lines.append(
            "debug.moe_force_load_balance=true and debug.routing_replay both say where tokens go: "
            "choose one"
        )
    return lines


def _capture(run: Run) -> list[str]:
    step, steps = run.job.debug.capture_step, run.job.training.steps
    if step <= steps:
        return []
    return [f"debug.capture_step={step} is beyond training.steps={steps}: choose one of its steps"]


def _optimizer(run: Run) -> list[str]:
    optimizer = run.job.optimizer
    muon = optimizer.name == "Muon"
    defaults = type(optimizer)()
    lines = [
        f"optimizer.{key}={getattr(optimizer, key)} is Muon's: leave it out, or choose "
        "optimizer.name=Muon"
        for key in ("muon_momentum", "muon_steps", "muon_rms")
        if not muon and getattr(optimizer, key) != getattr(defaults, key)
    ]
    if optimizer.state_dtype == "bfloat16":
        # Half a unit in the last place is up to 1/256: a smaller change is rounded away.
        lines += [
            f"optimizer.{key}={getattr(optimizer, key)} changes a moment by less than "
            "optimizer.state_dtype=bfloat16 can tell: choose 0.99 or less, or float32"
            for key in ("beta1", "beta2", *["muon_momentum"] * muon)
            if getattr(optimizer, key) > 0.99
        ]
    return lines


def _has_other_files(folder: Path) -> bool:
    """Whether there is something, and no routing record."""
    if not folder.is_dir():
        return folder.exists()
    return any(folder.iterdir()) and not (folder / "record.json").is_file()


_RULES: list[Callable[[Run], list[str]]] = [
    _unlimited_or_positive,
    *PARALLEL_RULES,
    _sequence_length,
    _further_tokens,
    _moe_settings,
    *PRECISION_RULES,
    _cpu_offload,
    _precision,
    _recompute,
    _profiling,
    _memory_snapshot,
    _checkpoint_enabled,
    _hugging_face,
    _routing_traces,
    _capture,
    _optimizer,
]
