"""Read the configuration, check it, and only then import torch and train.

Exit codes: 0; 2 for a configuration that cannot run; 1 for a run that failed; 70 for an error in
titan_moe; 75 for a run without torchrun that stopped at training.max_seconds, saved.
torchrun takes 0 alone for a good end: to it a stop is that, and its launcher makes the 75.
"""

import gc
import logging
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from titan_moe.config.checks.data import check_vocabulary
from titan_moe.config.checks.experts import check_trains_on_gpus
from titan_moe.config.checks.job import check, notes
from titan_moe.config.checks.run import flavor
from titan_moe.config.checks.run_folder import check_run_folder
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig, Parallelism
from titan_moe.config.parse import load_job, read_job, resolve
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import HFModel, as_record, export_problems, model_of_job
from titan_moe.runtime.errors import CRASHED, RunError, disk_remedy, is_outside
from titan_moe.runtime.failure import report
from titan_moe.runtime.launch import (
    Launch,
    attempt_number,
    count_gpus,
    has_bfloat16_units,
    run_as_command,
)
from titan_moe.runtime.log import start_logging
from titan_moe.runtime.run_lock import RunLock
from titan_moe.runtime.stopping import STOPPED, attempt_folder

logger = logging.getLogger(__name__)


def main(argv: list[str], environment: Mapping[str, str]) -> int:
    """Train, and return the exit code; what went wrong is reported, never raised."""
    launch = Launch.from_environment(environment)
    records: Path | None = None
    try:
        records = attempt_folder(environment)
        stopped = _run(argv, environment, launch, records)
    except SystemExit:  # --help
        raise
    except BaseException as error:
        lines, exit_code, expected = _explain(error, launch.rank)
        if not expected:
            traceback.print_exc()
        report(launch.rank, lines, exit_code, expected=expected, to=records)
        return exit_code
    return STOPPED if stopped and "RANK" not in environment else 0


def read_for_device(argv: list[str], environment: Mapping[str, str]) -> tuple[JobConfig, list[str]]:
    """As `read_job`. Computes in float32 on a CPU without bfloat16 units, if no file or argument
    names the type; a line says so."""
    job, lines = read_job(argv)
    key, training = "mixed_precision_param", job.training
    if key in training.model_fields_set or training.dtype != "float32":
        return job, lines
    if count_gpus(environment) or has_bfloat16_units():
        return job, lines
    line = f"training.{key}: float32, since this CPU has no bfloat16 units and no key asks for them"
    training = training.model_copy(update={key: "float32"})
    return job.model_copy(update={"training": training}), [*lines, line]


def prepare(
    argv: list[str], world_size: int, environment: Mapping[str, str]
) -> tuple[JobConfig, ModelConfig]:
    """The resolved configuration and its model's dimensions; raises ConfigError."""
    return prepare_job(load_job(argv), world_size, environment)


def prepare_job(
    job: JobConfig, world_size: int, environment: Mapping[str, str]
) -> tuple[JobConfig, ModelConfig]:
    """As `prepare`, of a configuration that has been read."""
    _log_ranks(environment)
    if job.checkpoint.create_seed_checkpoint:
        # Initial weights are the same in every layout: any number of ranks can write them.
        job = job.model_copy(update={"parallelism": Parallelism(), "stages": []})
    model = model_of_job(job.model)
    num_gpus = count_gpus(environment)
    problems = check(job, model, world_size, num_gpus=num_gpus)
    problems += check_trains_on_gpus(job, num_gpus)
    if job.checkpoint.last_save_in_hf:
        problems += export_problems(HFModel(job.model.name, model), job.moe.bias_update_speed)
    if problems:
        raise ConfigError(problems)
    return resolve(job, world_size), model


def check_all(
    argv: list[str], world_size: int, num_nodes: int, environment: Mapping[str, str]
) -> tuple[JobConfig, list[str]]:
    """Check configuration, tokenizer and data in one plain process, before any rank starts; returns
    the resolved configuration, and a line for what has no effect. Raises ConfigError with
    everything that is wrong."""
    # Imported here: numpy's import is not for every rank to wait for.
    from titan_moe.data.build import check_data
    from titan_moe.data.tokenizer import load_tokenizer
    from titan_moe.metrics.sinks import missing_packages

    if world_size % num_nodes:
        raise ConfigError([f"--ranks {world_size} must be a multiple of --nodes {num_nodes}"])
    job, without_effect = read_for_device(argv, environment)
    job, model = prepare_job(job, world_size, environment)
    without_effect += notes(job, model, world_size, num_gpus=count_gpus(environment))
    problems = check_run_folder(job, as_record(model)) + missing_packages(job.metrics)
    if problems := problems + check_data(job.training, job.validation, job.model.tokenizer_path):
        raise ConfigError(problems)
    tokenizer = load_tokenizer(job.model.tokenizer_path)
    if problems := check_vocabulary(job, model, tokenizer.vocab_size):
        raise ConfigError(problems)
    return job, without_effect


def _run(
    argv: list[str], environment: Mapping[str, str], launch: Launch, records: Path | None
) -> bool:
    """Returns whether the run stopped before its last step, saved. `records`: of failures."""
    job, without_effect = read_for_device(argv, environment)
    job, model = prepare_job(job, launch.world_size, environment)
    without_effect += notes(job, model, launch.world_size, num_gpus=count_gpus(environment))
    color = not job.metrics.disable_color_printing
    start_logging(launch.rank, _log_ranks(environment), color=color)
    if launch.rank == 0:
        # Before torch, whose import takes seconds.
        logger.info("%s on %d rank(s): starting", flavor(job), launch.world_size)
        if number := attempt_number(environment):
            logger.warning("restart %d of this run, after a failure", number)
    for note in without_effect:
        logger.info(note)

    # Importing torch makes a million objects that stay; looking for garbage among them again and
    # again takes half a second. The trainer collects in its own time.
    gc.disable()
    from titan_moe.debug.hang.watch import watch_for_hangs
    from titan_moe.runtime.process import process_group
    from titan_moe.trainer import train

    folder = Path(job.job.dump_folder)
    reports, save_limit = folder / job.comm.save_traces_folder, job.checkpoint.save_timeout_seconds
    with (
        process_group(launch, job.comm, environment) as process,
        watch_for_hangs(process, job.comm, save_limit, reports, records),
        ExitStack() as locks,
    ):
        for place, key in _places(job):
            locks.enter_context(_only_run(place, key, process.rank, records))
        _check_folder(job, model)
        return train(job, model, process)


def _places(job: JobConfig) -> list[tuple[Path, str]]:
    """As `_written_folders`, the same on every rank, whatever a node's disk has; collective."""
    from titan_moe.distributed.agreement import on_rank_zero

    return on_rank_zero(lambda: list(_written_folders(job)), doing="cannot read the run's folder")


def _written_folders(job: JobConfig) -> Iterator[tuple[Path, str]]:
    """Each folder that no other run may write into, and the key that names it. Checkpoints may lie
    outside of the run's folder, by their own path or by a link."""
    folder = Path(job.job.dump_folder)
    yield folder, "job.dump_folder"
    saves = folder / job.checkpoint.folder
    inside = saves.resolve().is_relative_to(folder.resolve())
    if job.checkpoint.enable and not job.checkpoint.load_only and not inside:
        yield saves, "checkpoint.folder"


@contextmanager
def _only_run(folder: Path, key: str, rank: int, records: Path | None) -> Iterator[None]:
    """RunError on all ranks where another run writes into the folder; collective. A run that loses
    the folder later ends at once."""
    from titan_moe.distributed.agreement import on_rank_zero

    def end(line: str) -> None:
        report(rank, [line], 1, expected=True, to=records)
        os._exit(1)

    lock = RunLock(folder, key=key, on_loss=end)
    on_rank_zero(lock.acquire, doing=f"cannot lock {folder}")
    try:
        yield
    finally:
        if rank == 0:
            lock.release()


def _check_folder(job: JobConfig, model: ModelConfig) -> None:
    """ConfigError on all ranks where the folder is another run's; collective. torchrun may have
    been started without `check_all`, and another run may have written since."""
    from titan_moe.distributed.agreement import on_rank_zero

    problems = on_rank_zero(
        lambda: check_run_folder(job, as_record(model)), doing="cannot read the run's folder"
    )
    if problems:
        raise ConfigError(problems)


def _log_ranks(environment: Mapping[str, str]) -> set[int]:
    text = environment.get("LOG_RANK", "0")
    try:
        return {int(rank) for rank in text.split(",")}
    except ValueError:
        raise ConfigError([f"LOG_RANK={text} must be rank numbers, such as 0 or 0,1"]) from None


def _explain(error: BaseException, rank: int) -> tuple[list[str], int, bool]:
    """Lines, exit code, and whether the error is one that a user can mend."""
    if isinstance(error, ConfigError):
        return error.lines, 2, True
    if isinstance(error, RunError):
        return [str(error)], 1, True
    if isinstance(error, OSError) and (remedy := disk_remedy(error)):
        place = error.filename or "a file"
        if isinstance(error, PermissionError):
            return [f"cannot read or write {place}: {error.strerror}; {remedy}"], 1, True
        return [f"cannot write {place}: {error.strerror}; {remedy}"], 1, True
    reason = next(iter(str(error).strip().splitlines()), "")
    code = 1 if is_outside(error) else CRASHED
    if type(error).__name__ == "OutOfMemoryError":  # torch is not imported here.
        reason += " (docs/troubleshooting.md#out-of-memory-on-the-gpu)"
    return [f"rank {rank}: {type(error).__name__}: {reason}"], code, False


if __name__ == "__main__":  # As torchtitan is started: torchrun ... -m titan_moe.train
    run_as_command("train")
