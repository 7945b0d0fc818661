"""Estimate what a configuration keeps on each GPU.

    titan-moe memory --config FILE --ranks 64

Prints the number of parameters, a line of GiB or MiB, and one more for each training stage; what
microbatches share on such a GPU; and whether all of it fits, with communicators and a rank of
experts that gets twice an even share of rows. In a pipeline the rank that needs most is counted, as
an upper bound. titan_moe/parallelize/memory_table.py says what is counted. Needs no GPU.

Exit codes: 0 it fits; 1 it does not fit; 2 a configuration that cannot run.
"""

import argparse
from functools import partial

from titan_moe.cli.command import Answer, Command, add_ranks, job_of
from titan_moe.config.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(parser, default=8, says="GPUs of the run; default: 8")
    says = "memory of a GPU; default: %(default)s, of an H100 of 80 GB"
    parser.add_argument("--gpu-gib", type=float, default=79.0, metavar="GIB", help=says)


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.checks.base import Run
    from titan_moe.checks.notes import without_experts
    from titan_moe.checks.run import names
    from titan_moe.config.training_stages import training_stages
    from titan_moe.models.hf import model_of_job
    from titan_moe.models.stats import total
    from titan_moe.parallelize.communicators import NODE
    from titan_moe.parallelize.memory import GIB, accumulation_line, memory
    from titan_moe.parallelize.policies import make_plan

    job, gpu = job_of(options), options.gpu_gib * GIB
    config = model_of_job(job.model)
    if config.moe is None:
        job = without_experts(job)
    if problems := list(names(Run(job, config, options.ranks))):
        raise ConfigError(problems)
    size = total(config)
    active = size.active(config)
    on_gpus = partial(make_plan, device_type="cuda", device_bytes=gpu, ranks_per_node=NODE)
    try:
        plans = {
            step: on_gpus(stage, config, options.ranks) for step, stage in training_stages(job)
        }
    except ValueError as error:
        line = f"--ranks {options.ranks}: {error}: choose other degrees, or another --ranks"
        raise ConfigError(line) from error
    found = {step: memory(plan) for step, plan in plans.items()}
    lines = {step: accumulation_line(plan, found[step]) for step, plan in plans.items()}
    most = max(found.values(), key=lambda estimate: estimate.needed)
    fits = most.needed <= gpu
    (_, first), *later = found.items()
    starts = {step: f"from step {step}: " if step > 1 else "" for step in plans}
    data = {
        "parameters": sum(size),
        "active_parameters": active,
        "moment": first.moment,
        "bytes": first.sizes,
        "accumulation": {"word": plans[1].accumulation, "microbatches": plans[1].microbatches},
        "needed": most.needed,
        "fits": fits,
    }
    verdict = "fits" if fits else "does not fit"
    stages = [{"from_step": n, "moment": x.moment, "bytes": x.sizes} for n, x in later]
    piped = job.parallelism.pipeline_parallel_degree > 1
    return Answer(
        data | ({"stages": stages} if stages else {}),
        [
            f"{_count(sum(size))} parameters, {_count(active)} active",
            f"{first.unit}: {first}",
            *(f"{stage.unit} from step {step}: {stage}" for step, stage in later),
            f"stored has the moments of optimizer.name={job.optimizer.name}"
            + (", one of a layer's matrix and two of others" * (job.optimizer.name == "Muon")),
            *(["the rank of the pipeline that needs most, an upper bound"] if piped else []),
            *(starts[step] + line for step, line in lines.items() if line),
            f"{verdict}: {most.margin(gpu)}",
        ],
        exit_code=0 if fits else 1,
    )


def _count(parameters: float) -> str:
    return f"{parameters / 1e9:.1f} G" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


COMMAND = Command(run, add_arguments, overrides=True)
