"""Estimate what a configuration keeps on each GPU.

    titan-moe memory --config FILE --ranks 64

Prints the number of parameters, a line of GiB, and one more for each training stage; what NCCL's
buffers take beside it; and what microbatches share on such a GPU. titan_moe/simulate/memory.py says
what is counted. Needs no GPU.

Exit codes: 0; 2 a configuration that cannot run, or that is not counted.
"""

import argparse
from dataclasses import asdict

from titan_moe.cli.command import Answer, Command, add_ranks, job_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(parser, default=8, says="GPUs of the run; default: 8")
    says = "memory of a GPU; default: %(default)s, of an H100 of 80 GB"
    parser.add_argument("--gpu-gib", type=float, default=79.0, metavar="GIB", help=says)


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.config.parse import load_job
    from titan_moe.config.stages import stage_jobs
    from titan_moe.models.hf import model_of_job
    from titan_moe.models.stats import total
    from titan_moe.simulate.memory import GIB, choose_accumulation, communicators, memory

    job = load_job(job_arguments(options))
    config = model_of_job(job.model)
    size = total(config)
    active = size.active(config)
    found = {}
    for step, stage in stage_jobs(job):
        sections = (stage.training, stage.parallelism, stage.activation_checkpoint)
        found[step] = memory(config, *sections, world_size=options.ranks)
    first = found.pop(1)
    groups = communicators(job.parallelism, options.ranks)
    sections = (job.training, job.parallelism, job.activation_checkpoint)
    shared = choose_accumulation(config, *sections, options.ranks, options.gpu_gib * GIB)
    data = {
        "parameters": sum(size),
        "active_parameters": active,
        "bytes": asdict(first),
        "communicators": groups._asdict(),
        "accumulation": asdict(shared),
    }
    stages = [{"from_step": step, "bytes": asdict(stage)} for step, stage in found.items()]
    return Answer(
        data | ({"stages": stages} if stages else {}),
        [
            f"{sum(size) / 1e9:.1f} G parameters, {active / 1e9:.1f} G active",
            f"GiB: {first}",
            *(f"GiB from step {step}: {stage}" for step, stage in found.items()),
            str(groups),
            *([shared.line] if shared.line else []),
        ],
    )


COMMAND = Command(run, add_arguments, overrides=True)
