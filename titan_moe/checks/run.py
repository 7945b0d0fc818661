"""Rules on a run: optimizer, precision, profiles, checkpoints, and the response to bad steps."""

from collections.abc import Iterator
from pathlib import Path

from titan_moe.checks.base import Rule, Run, narrow_keys
from titan_moe.config.job_config import OPTIMIZER_KEYS


def _optimizer(run: Run) -> Iterator[str]:
    optimizer = run.job.optimizer
    if not (narrow := narrow_keys(run.job)):
        return
    for key in ("beta1", "beta2", "muon_momentum"):
        # Half a unit in the last place is up to 1/256: a smaller change is rounded away.
        if key in OPTIMIZER_KEYS[optimizer.name] and getattr(optimizer, key) > 0.99:
            yield (
                f"optimizer.{key}={getattr(optimizer, key)} changes a moment by less than "
                f"{' and '.join(narrow)}=bfloat16 can tell: choose 0.99 or less, or float32"
            )


def _schedule(run: Run) -> Iterator[str]:
    schedule = run.job.lr_scheduler
    total_steps = schedule.total_steps or run.job.training.steps
    ratio = 1.0 if schedule.decay_ratio is None else schedule.decay_ratio
    from_start = not schedule.warmup_steps and round(total_steps * ratio) >= total_steps
    if schedule.decay_type == "inverse_sqrt" and from_start:
        line = "inverse_sqrt cannot fall from step 0: choose 1 or more, or a smaller decay_ratio"
        yield f"lr_scheduler.warmup_steps=0: {line}"


def _precision(run: Run) -> Iterator[str]:
    job, training, float8 = run.job, run.job.training, run.job.quantize.linear.float8
    if (training.dtype, training.mixed_precision_param) == ("bfloat16", "float32"):
        yield (
            "training.mixed_precision_param=float32 cannot restore parameters stored with "
            "training.dtype=bfloat16: choose training.dtype=float32"
        )
    named = set(job.model.converters)
    if float8.emulate and "quantize.grouped_mm.float8" in named:
        yield (
            "model.converters=quantize.grouped_mm.float8: torchao does not emulate it: leave it "
            "out, or quantize.linear.float8.emulate=true"
        )
    wide = training.dtype == "float64" or training.mixed_precision_param != "bfloat16"
    if wide and named and (not float8.emulate or "quantize.grouped_mm.mx" in named):
        yield (
            f"training.mixed_precision_param={training.mixed_precision_param} with "
            f"training.dtype={training.dtype}: float8 products go with bfloat16: choose "
            "mixed_precision_param=bfloat16 and dtype=float32"
        )
    if "quantize.linear.float8" not in named or float8.emulate:
        return
    # The weights' gradients sum over a microbatch's tokens.
    degrees, piped = job.parallelism, job.parallelism.pipeline_parallel_degree > 1
    rows = degrees.pipeline_parallel_microbatch_size if piped else training.local_batch_size
    slices = degrees.context_parallel_degree * degrees.tensor_parallel_degree
    if (tokens := rows * training.seq_len // slices) % 16:
        yield (
            f"training.seq_len={training.seq_len}: {rows} sequences / cp x tp {slices} are "
            f"{tokens} tokens, and quantize.linear.float8 wants a multiple of 16: choose a "
            f"multiple of {16 * slices}"
        )


def _lora(run: Run) -> Iterator[str]:
    job = run.job
    if job.lora.rank is None:
        if (path := job.lora.initial_load_path) is not None:
            yield f"lora.initial_load_path={path} without lora.rank: set it to the adapters' r"
        return
    if job.model.converters:
        named = ",".join(job.model.converters)
        yield f"model.converters={named} and lora.rank={job.lora.rank}: leave one of them out"
    if job.training.indexer_stage == "dense":
        yield (
            "training.indexer_stage=dense trains indexers alone, and lora.rank="
            f"{job.lora.rank} adapters alone: leave lora.rank out"
        )
    if "model" in job.checkpoint.exclude_from_loading:
        yield (
            f"checkpoint.exclude_from_loading=model with lora.rank={job.lora.rank}: adapters would "
            "be trained on random weights: leave model out"
        )
    if job.checkpoint.initial_load_path and not job.checkpoint.initial_load_model_only:
        yield (
            f"checkpoint.initial_load_model_only=false with lora.rank={job.lora.rank}: adapters "
            "have no optimizer state there: set it to true"
        )


def names(run: Run) -> Iterator[str]:
    """Yields a line for each pattern that names nothing, or one where nothing is left to train."""
    job = run.job
    if job.training.freeze or job.optimizer.groups or job.lora.rank is not None:
        from titan_moe.models.trained import unknown_patterns  # With torch, which takes a while.

        yield from unknown_patterns(run.model, job.training, job.lora, job.optimizer.groups)


def _profiling(run: Run) -> Iterator[str]:
    profiling = run.job.profiling
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < needed:
        yield (
            f"profiling.profile_freq={profiling.profile_freq} must be at least profiler_warmup + "
            f"profiler_active: choose {needed} or more"
        )


def _capture(run: Run) -> Iterator[str]:
    step = run.job.debug.capture_step
    if 0 < step <= run.job.training.steps and run.job.compile.enable:
        yield (
            f"debug.capture_step={step} looks into layers that "
            "compile.enable=true fuses: choose one"
        )


def _checkpoint(run: Run) -> Iterator[str]:
    checkpoint = run.job.checkpoint
    needing = {
        "create_seed_checkpoint=true": checkpoint.create_seed_checkpoint,
        f"initial_load_path={checkpoint.initial_load_path}": checkpoint.initial_load_path,
        f"load_step={checkpoint.load_step}": checkpoint.load_step != -1,
        "initial_load_in_hf=true": checkpoint.initial_load_in_hf,
    }
    for setting, is_set in needing.items():
        if is_set and not checkpoint.enable:
            yield f"checkpoint.{setting} is not read without checkpoint.enable=true: set it"
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        yield (
            "checkpoint.initial_load_model_only=false: Hugging Face folders hold the model only, "
            "set it to true beside checkpoint.initial_load_in_hf=true"
        )
    if checkpoint.initial_load_in_hf and not (
        checkpoint.initial_load_path or run.job.model.hf_assets_path
    ):
        yield (
            "checkpoint.initial_load_in_hf=true needs a folder: set checkpoint.initial_load_path "
            "or model.hf_assets_path"
        )
    if checkpoint.enable and checkpoint.last_save_in_hf and checkpoint.load_only:
        yield "checkpoint.last_save_in_hf=true: load_only=true saves nothing: choose one"


def _routing_traces(run: Run) -> Iterator[str]:
    debug = run.job.debug
    record, replay = debug.routing_record, debug.routing_replay
    if record is not None and _has_other_files(Path(record)):
        yield f"debug.routing_record={record} holds other files: choose a new folder"
    if record is not None:
        runs = Path(run.job.job.dump_folder).resolve()
        if runs.is_relative_to(Path(record).resolve()):
            line = f"debug.routing_record={record} holds job.dump_folder={runs}"
            yield f"{line}: choose another folder"
    if debug.router_load is not None and debug.moe_force_load_balance:
        yield (
            f"debug.moe_force_load_balance=true and {debug.routing} both say where tokens go: "
            "choose one"
        )
    if replay is None:
        return
    if not (Path(replay) / "record.json").is_file():
        yield (
            f"debug.routing_replay={replay} has no record.json: name the folder of a "
            f"debug.routing_record"
        )
    if record is not None and Path(record).resolve() == Path(replay).resolve():
        yield f"debug.routing_record={record} is also debug.routing_replay: choose another folder"
    if debug.routing is not None:
        yield f"{debug.routing} and debug.routing_replay both say where tokens go: choose one"


def _has_other_files(folder: Path) -> bool:
    """Returns whether something is there that is no routing record."""
    if not folder.is_dir():
        return folder.exists()
    return any(folder.iterdir()) and not (folder / "record.json").is_file()


RULES: list[Rule] = [
    _optimizer,
    _schedule,
    _precision,
    _lora,
    names,
    _profiling,
    _capture,
    _checkpoint,
    _routing_traces,
]
