"""Estimate what a configuration keeps on each GPU.

    titan-moe memory --config FILE --ranks 64

Prints the number of parameters and one line of GiB; titan_moe/simulate/memory.py says what they
count. Needs no GPU. Exit codes: 0; 2 a configuration that cannot run, or that is not counted.
"""

import argparse
from dataclasses import asdict

from titan_moe.cli.command import Answer, Command, add_ranks, job_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(parser, default=8, says="GPUs of the run; default: 8")


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.config.parse import load_job
    from titan_moe.models.hf import model_of_job
    from titan_moe.models.stats import total
    from titan_moe.simulate.memory import memory

    job = load_job(job_arguments(options))
    config = model_of_job(job.model)
    size = total(config)
    sections = (job.training, job.parallelism, job.activation_checkpoint)
    found = memory(config, *sections, world_size=options.ranks)
    active = size.active(config)
    return Answer(
        {"parameters": sum(size), "active_parameters": active, "bytes": asdict(found)},
        [f"{sum(size) / 1e9:.1f} G parameters, {active / 1e9:.1f} G active", f"GiB: {found}"],
    )


COMMAND = Command(run, add_arguments, overrides=True, mistakes=(ValueError,))
