"""Read the configuration, check it, and only then import torch and train.

Exit codes of a rank: 0; 2 for a configuration that cannot run; 1 for a run that failed; 70 for an
error in titan_moe. torchrun takes 0 alone for a good end, so a rank that stopped, saved, ends with
0, and the launcher with 75.
"""

import gc
import logging
import traceback
from collections.abc import Mapping
from pathlib import Path

from titan_moe.checks.base import flavor
from titan_moe.checks.run_folder import check_run_folder
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import as_record
from titan_moe.prepare.job import log_ranks, prepare
from titan_moe.runtime.errors import CRASHED, RunError, disk_remedy, is_outside, report
from titan_moe.runtime.files import lock_folder
from titan_moe.runtime.launch import Launch, attempt_number, run_as_command
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


def _run(
    argv: list[str], environment: Mapping[str, str], launch: Launch, records: Path | None
) -> None:
    """Train on this rank. `records`: the folder for this rank's failure."""
    job, model, lines = prepare(argv, launch.world_size, environment)
    start_logging(launch.rank, log_ranks(environment, launch.world_size))
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
