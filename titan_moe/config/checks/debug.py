"""Profiles, memory snapshots, communicators, routing traces and captures."""

from pathlib import Path

from titan_moe.config.checks.run import Check, Note, Run


def _profiling(run: Run) -> list[str]:
    profiling = run.job.profiling
    needed = profiling.profiler_warmup + profiling.profiler_active
    if not profiling.enable_profiling or profiling.profile_freq >= needed:
        return []
    return [
        f"profiling.profile_freq={profiling.profile_freq} must be at least profiler_warmup "
        f"{profiling.profiler_warmup} + profiler_active {profiling.profiler_active} = {needed}"
    ]


def _memory_snapshot(run: Run) -> list[str]:
    if not run.job.profiling.enable_memory_snapshot or run.num_gpus:
        return []
    return [
        Note(
            "profiling.enable_memory_snapshot=true has no effect on a CPU: a snapshot is of CUDA's "
            "allocator"
        )
    ]


def _communicators(run: Run) -> list[str]:
    if run.num_gpus:
        return []
    return [
        Note(f"comm.{key}=true has no effect on a CPU: communicators are NCCL's")
        for key in ("init_communicators_eagerly", "split_communicators")
        if getattr(run.job.comm, key)
    ]


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


def _has_other_files(folder: Path) -> bool:
    """Whether there is something, and no routing record."""
    if not folder.is_dir():
        return folder.exists()
    return any(folder.iterdir()) and not (folder / "record.json").is_file()


def _capture(run: Run) -> list[str]:
    step, steps = run.job.debug.capture_step, run.job.training.steps
    if step <= steps:
        return []
    return [Note(f"debug.capture_step={step} has no effect: it is beyond training.steps={steps}")]


CHECKS: list[Check] = [_profiling, _memory_snapshot, _communicators, _routing_traces, _capture]
