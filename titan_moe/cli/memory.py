"""Estimate what a configuration keeps on each GPU.

    titan-moe memory --config FILE --ranks 64

Prints the number of parameters, a line of GiB or MiB, and one more for each training stage; what
microbatches share on such a GPU; and whether all of it fits. In a pipeline the rank that needs most
is counted, as an upper bound. titan_moe/distributed/memory.py says what is counted. Needs no GPU.

Exit codes: 0 it fits; 1 it does not fit; 2 a configuration that cannot run.
"""

import argparse
from dataclasses import asdict

from titan_moe.cli.command import Answer, Command, add_ranks, job_of
from titan_moe.config.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(parser, default=8, says="GPUs of the run; default: 8")
    says = "memory of a GPU; default: %(default)s, of an H100 of 80 GB"
    parser.add_argument("--gpu-gib", type=float, default=79.0, metavar="GIB", help=says)


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.config.stages import stage_jobs
    from titan_moe.distributed.memory import GIB, RESERVED, choose_accumulation, memory
    from titan_moe.distributed.parallel_dims import parallel_dims
    from titan_moe.models.hf import model_of_job
    from titan_moe.models.stats import total

    job = job_of(options)
    config = model_of_job(job.model)
    size = total(config)
    active = size.active(config)
    found, needed = {}, 0.0
    for step, stage in stage_jobs(job):
        sections = (stage.training, stage.parallelism, stage.activation_checkpoint)
        found[step] = memory(config, *sections, world_size=options.ranks)
        try:
            parallel_dims(stage.parallelism, options.ranks)
        except ValueError as error:
            raise ConfigError(
                [f"--ranks {options.ranks}: {error}: choose other degrees, or another --ranks"]
            ) from error
        needed = max(needed, found[step].total + RESERVED)
    first = found.pop(1)
    sections = (job.training, job.parallelism, job.activation_checkpoint)
    shared = choose_accumulation(config, *sections, options.ranks, options.gpu_gib * GIB)
    fits = needed <= options.gpu_gib * GIB
    data = {
        "parameters": sum(size),
        "active_parameters": active,
        "bytes": asdict(first),
        "accumulation": asdict(shared),
        "needed": needed,
        "fits": fits,
    }
    verdict = "fits" if fits else "does not fit"
    stages = [{"from_step": step, "bytes": asdict(stage)} for step, stage in found.items()]
    piped = job.parallelism.pipeline_parallel_degree > 1
    return Answer(
        data | ({"stages": stages} if stages else {}),
        [
            f"{_count(sum(size))} parameters, {_count(active)} active",
            f"{first.unit}: {first}",
            *(f"{stage.unit} from step {step}: {stage}" for step, stage in found.items()),
            *(["the rank of the pipeline that needs most, an upper bound"] if piped else []),
            *([shared.line] if shared.line else []),
            f"{verdict}: {needed / GIB:.1f} of {options.gpu_gib:.1f} GiB, "
            f"with {RESERVED / GIB:.0f} GiB for CUDA, NCCL and the allocator",
        ],
        exit_code=0 if fits else 1,
    )


def _count(parameters: float) -> str:
    return f"{parameters / 1e9:.1f} G" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


COMMAND = Command(run, add_arguments, overrides=True)
