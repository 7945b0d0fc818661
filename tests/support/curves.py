"""Trains a run of a comparison on ranks of this machine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.support.trainings import train_here
from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job, resolve
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.trainer import Trainer
from titan_moe.verify.compare.control_runs import batch_words
from titan_moe.verify.compare.records import Curve, read_run
from titan_moe.verify.compare.run_spec import RunSpec, Words

_LOGGED = {
    "metrics.log_freq": "1",
    "metrics.log_parameter_norms": "true",
    "metrics.log_expert_counts": "true",
}


def train(
    spec: RunSpec,
    folder: Path,
    words: Words = (),
    alter: Callable[[Trainer], None] | None = None,
) -> Curve:
    """Returns a run's loss, the norms of all parameters ("norm of NAME") and loads of all experts.

    Args:
        words: keys besides the spec's.
        alter: plants a mistake on every rank before the first step.
    """
    keys = dict((*batch_words(spec, spec.job()), *words)) | _LOGGED
    keys["job.dump_folder"] = str(folder)
    job = resolve(load_job([*spec.file(), *spec.arguments(*keys.items())]), spec.world_size)
    run_on_ranks(_train_altered, spec.world_size, job, alter)
    curve = read_run(folder).curve
    lines = read_json_lines(folder / "parameter_norms.jsonl")
    names = lines[0].keys() - {"step"}
    norms = {f"norm of {name}": np.array([line[name] for line in lines]) for name in names}
    return replace(curve, scalars={**curve.scalars, **norms})


def _train_altered(job: JobConfig, alter: Callable[[Trainer], None] | None) -> None:
    train = Trainer.train

    def altered(trainer: Trainer) -> bool:
        if alter is not None:
            alter(trainer)
        return train(trainer)

    Trainer.train = altered  # type: ignore[method-assign]
    train_here(job)
