"""How a step runs: optimizer, offloading, recomputed and compiled layers."""

import shutil

from titan_moe.config import pipeline
from titan_moe.config.checks.run import Check, Note, Run
from titan_moe.config.job_config import OPTIMIZER_KEYS


def _optimizer(run: Run) -> list[str]:
    optimizer = run.job.optimizer
    read = {"name", "lr", "weight_decay", *OPTIMIZER_KEYS[optimizer.name]}
    lines: list[str] = []
    for key, field in type(optimizer).model_fields.items():
        value = getattr(optimizer, key)
        if key not in read and value != field.default:
            others = [name for name, keys in OPTIMIZER_KEYS.items() if key in keys]
            lines.append(
                Note(
                    f"optimizer.{key}={value} has no effect with optimizer.name={optimizer.name}, "
                    f"but with {' or '.join(others)}"
                )
            )
    if optimizer.state_dtype == "bfloat16":
        # Half a unit in the last place is up to 1/256: a smaller change is rounded away.
        lines += [
            f"optimizer.{key}={getattr(optimizer, key)} changes a moment by less than "
            "optimizer.state_dtype=bfloat16 can tell: choose 0.99 or less, or float32"
            for key in ("beta1", "beta2", "muon_momentum")
            if key in read and getattr(optimizer, key) > 0.99
        ]
    return lines


def _cpu_offload(run: Run) -> list[str]:
    if not run.job.training.enable_cpu_offload or run.num_gpus:
        return []
    return [Note("training.enable_cpu_offload=true has no effect on a CPU")]


def _spikes(run: Run) -> list[str]:
    training = run.job.training
    if training.spike_factor is not None or training.on_spike == "stop":
        return []
    return [
        Note(
            f"training.on_spike={training.on_spike} has no effect without training.spike_factor, "
            "such as 10"
        )
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


def _compile(run: Run) -> list[str]:
    section = run.job.compile
    if not section.enable:
        return []
    lines = []
    if run.job.debug.capture_step:
        lines.append(
            f"debug.capture_step={run.job.debug.capture_step} looks into layers that "
            "compile.enable=true fuses: choose one"
        )
    degrees = run.job.parallelism
    schedule = pipeline.SCHEDULES[degrees.pipeline_parallel_schedule]
    piped = degrees.pipeline_parallel_degree > 1
    if piped and schedule.splits_backward and section.compiles_layers:
        whole = [name for name, known in pipeline.SCHEDULES.items() if not known.splits_backward]
        lines.append(
            f"parallelism.pipeline_parallel_schedule={degrees.pipeline_parallel_schedule} splits "
            f"the backward, which compile.enable=true makes one graph of: choose "
            f"{' or '.join(whole)}, or compile.components=['loss']"
        )
    if section.backend == "inductor" and not run.num_gpus and shutil.which("g++") is None:
        lines.append(
            "compile.backend=inductor needs the C++ compiler g++, which was not found: install it, "
            "or choose compile.enable=false"
        )
    return lines


CHECKS: list[Check] = [_optimizer, _cpu_offload, _spikes, _recompute, _compile]
