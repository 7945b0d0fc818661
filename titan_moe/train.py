"""Read the configuration, check it, and only then import torch and train.

Exit codes of a rank: 0; 2 for a configuration that cannot run; 1 for a run that failed; 70 for an
error in titan_moe. torchrun takes 0 alone for a good end, so a rank that stopped, saved, ends with
0, and the launcher with 75.
"""

import gc
import logging
import traceback
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from titan_moe.checks.base import flavor
from titan_moe.checks.data import check_vocabulary
from titan_moe.checks.job import check
from titan_moe.checks.notes import fit_to_cpu, narrow_lines, notes, without_experts
from titan_moe.checks.run_folder import check_run_folder, position_rule
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig, Parallelism
from titan_moe.config.parse import read_job, resolve
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import HFModel, as_record, export_problems, model_of_job
from titan_moe.prepare.load_checks import check_adapters, check_loading
from titan_moe.runtime.errors import CRASHED, RunError, disk_remedy, is_outside, report
from titan_moe.runtime.files import lock_folder
from titan_moe.runtime.launch import (
    Launch,
    attempt_number,
    count_gpus,
    has_bfloat16_units,
    run_as_command,
)
from titan_moe.runtime.log import start_logging
from titan_moe.runtime.stopping import attempt_folder

logger = logging.getLogger(__name__)


def main(argv: list[str], environment: Mapping[str, str]) -> int:
    """Train, and return the exit code. Reports errors, and raises none but SystemExit (--help)."""
    launch = Launch.from_environment(environment)
    records: Path | None = None
    try:
        records = attempt_folder(environment)
        _run(argv, environment, launch, records)
    except SystemExit:
        raise
    except BaseException as error:
        lines, exit_code, expected = _explain(error, launch.rank)
        if not expected:
            traceback.print_exc()
        report(launch.rank, lines, exit_code, expected=expected, to=records)
        return exit_code
    return 0


def prepare(
    argv: list[str], world_size: int, environment: Mapping[str, str]
) -> tuple[JobConfig, ModelConfig, list[str]]:
    """Returns the resolved configuration, the model's dimensions, and one note for each key that
    has no effect. Raises ConfigError."""
    given, lines = read_for_device(argv, environment)
    job, model = prepare_job(given, world_size, environment)
    lines += notes(given, model, world_size) + narrow_lines(job)
    if job.training.freeze or job.optimizer.groups:
        from titan_moe.models.trained import pattern_lines  # With torch, which takes a while.

        lines += pattern_lines(model, job.training, job.lora, job.optimizer.groups)
    return job, model, lines


def prepare_job(
    job: JobConfig, world_size: int, environment: Mapping[str, str]
) -> tuple[JobConfig, ModelConfig]:
    """Check and resolve a configuration that has been read. Raises ConfigError."""
    _log_ranks(environment, world_size)
    if job.checkpoint.create_seed_checkpoint:
        # Initial weights are the same in every layout: any number of ranks can write them.
        job = job.model_copy(update={"parallelism": Parallelism(), "stages": []})
    model = model_of_job(job.model)
    if model.moe is None:
        job = without_experts(job)
    problems = check(job, model, world_size, [position_rule(job)])
    if job.model.converters and find_spec("torchao") is None:
        named = ",".join(job.model.converters)
        problems.append(f"model.converters={named} needs the package torchao: pip install torchao")
    if job.checkpoint.enable and job.checkpoint.last_save_in_hf:
        exported = model
        if job.moe.score is not None and model.moe is not None:
            exported = replace(model, moe=replace(model.moe, score=job.moe.score))
        # Adapters alone are exported, and the routing's bias is frozen beside them.
        speed = job.moe.bias_update_speed if job.lora.rank is None else 0.0
        problems += export_problems(HFModel(job.model.name, exported), speed)
    if problems:
        raise ConfigError(problems)
    return resolve(job, world_size), model


def read_for_device(argv: list[str], environment: Mapping[str, str]) -> tuple[JobConfig, list[str]]:
    """Read a configuration; returns it with one line for each key that does not do what it says.

    On a machine without GPUs, switches off what only they have.
    """
    job, lines = read_job(argv)
    if count_gpus(environment):
        return job, lines
    job, more = fit_to_cpu(job, bfloat16_units=has_bfloat16_units())
    return job, lines + more


def check_all(
    argv: list[str], world_size: int, num_nodes: int, environment: Mapping[str, str]
) -> tuple[JobConfig, list[str]]:
    """Check configuration, tokenizer, data and checkpoint in one plain process, before any rank
    starts.

    Returns the resolved configuration, and the notes of `prepare` and those about the data. Raises
    ConfigError with all mistakes.
    """
    # Imported here: ranks would wait for numpy's import.
    from titan_moe.data.build import check_data, data_notes
    from titan_moe.data.tokenizer import load_tokenizer
    from titan_moe.metrics.sinks import missing_packages

    if world_size % num_nodes:
        raise ConfigError(f"--ranks {world_size} must be a multiple of --nodes {num_nodes}")
    job, model, lines = prepare(argv, world_size, environment)
    problems = check_run_folder(job, as_record(model)) + missing_packages(job.metrics)
    if problems := problems + check_data(job.training, job.validation, job.model.tokenizer_path):
        raise ConfigError(problems)
    tokenizer = load_tokenizer(job.model.tokenizer_path, job.training)
    problems = check_vocabulary(job, model, tokenizer.vocab_size) or check_loading(job, model)
    problems = problems or check_adapters(job, model)
    if problems:
        raise ConfigError(problems)
    return job, lines + data_notes(job.training, job.validation)


def _run(
    argv: list[str], environment: Mapping[str, str], launch: Launch, records: Path | None
) -> None:
    """Train on this rank. `records`: the folder for this rank's failure."""
    job, model, lines = prepare(argv, launch.world_size, environment)
    start_logging(launch.rank, _log_ranks(environment, launch.world_size))
    if launch.rank == 0:
        # Before torch, whose import takes seconds.
        logger.info("%s on %d rank(s): starting", flavor(job), launch.world_size)
        if number := attempt_number(environment):
            logger.warning("restart %d of this run, after a failure", number)
    for line in lines:
        logger.info(line)

    # Importing torch makes a million objects that stay; looking for garbage among them again and
    # again takes half a second. The trainer collects in its own time.
    gc.disable()
    from titan_moe.comm.process import process_group
    from titan_moe.debug.hang import HangWatch
    from titan_moe.distributed.agreement import on_rank_zero
    from titan_moe.training.trainer import train

    folder, deterministic = Path(job.job.dump_folder), job.debug.deterministic
    reports, save_limit = folder / job.comm.save_traces_folder, job.checkpoint.save_timeout_seconds
    with (
        process_group(launch, job.comm, environment, deterministic=deterministic) as process,
        HangWatch(process, job.comm, save_limit, reports, records),
    ):
        problems = on_rank_zero(lambda: _take_folders(job, model), doing=f"cannot lock {folder}")
        if problems:
            raise ConfigError(problems)
        train(job, model, process)


def _take_folders(job: JobConfig, model: ModelConfig) -> list[str]:
    """Lock the run's folders until this process ends; returns what makes them another run's.

    `check_all` may have been left out (torchrun by hand), and another run may have written since.
    """
    folder = Path(job.job.dump_folder)
    lock_folder(folder, "job.dump_folder")
    # Checkpoints may lie outside of the run's folder, by their own path or by a link.
    saves = folder / job.checkpoint.folder
    inside = saves.resolve().is_relative_to(folder.resolve())
    if job.checkpoint.enable and not job.checkpoint.load_only and not inside:
        lock_folder(saves, "checkpoint.folder")
    return check_run_folder(job, as_record(model))


def _log_ranks(environment: Mapping[str, str], world_size: int) -> set[int]:
    text = environment.get("LOG_RANK", "0")
    try:
        ranks = {int(rank) for rank in text.split(",")}
    except ValueError:
        raise ConfigError(f"LOG_RANK={text} must be rank numbers, such as 0 or 0,1") from None
    if not ranks & set(range(world_size)):
        line = f"LOG_RANK={text}: none of the ranks 0 to {world_size - 1} would print: choose 0"
        raise ConfigError(line)
    return ranks


def _explain(error: BaseException, rank: int) -> tuple[list[str], int, bool]:
    """Returns the lines to print, the exit code, and whether a user can mend the error."""
    if isinstance(error, ConfigError):
        return error.lines, 2, True
    if isinstance(error, RunError):
        return [str(error)], 1, True
    if isinstance(error, OSError) and (remedy := disk_remedy(error)):
        does = "read or write" if isinstance(error, PermissionError) else "write"
        place = error.filename or "a file"
        return [f"cannot {does} {place}: {error.strerror}; {remedy}"], 1, True
    reason = next(iter(str(error).strip().splitlines()), "")
    code = 1 if is_outside(error) else CRASHED
    if type(error).__name__ == "OutOfMemoryError":  # torch is not imported here.
        reason += " (docs/troubleshooting.md#out-of-memory-on-the-gpu)"
    return [f"rank {rank}: {type(error).__name__}: {reason}"], code, False


if __name__ == "__main__":  # torchrun ... -m titan_moe.train, as for torchtitan
    run_as_command("train")
