"""Check a run's configuration and data in one plain process, before any rank starts.

    titan-moe check --config FILE --ranks 16 --nodes 2 --training.steps 20
    titan-moe check outputs/first/checkpoint

Opens every source of documents (training, blend, validation) as a run does, reads up to 64 of its
documents, and refuses a column that is not there and fewer documents than a global batch. Large
files are converted first and kept in the cache of `datasets`, where the run finds them. Where a
source is on the Hugging Face hub, without a local copy, no data is read. run_train.sh checks all
but these contents before it starts a rank.

Prints the number of ranks of a machine and the run's folder, what each training stage changes, the
parameters, the documents and tokens of each source, and what has no effect;
all that is wrong otherwise, a line each.

    titan-moe check --health --config FILE

--health starts the run's ranks instead, on this machine or with --nodes, --node-rank and --endpoint
on all, as `titan-moe train` does (`./run_train.sh --health` too). They check matmul, memory, the
disk of job.dump_folder, and all-reduce between each two ranks of a machine and each two machines,
and name what is wrong, hangs, or is slower than the others.

A folder instead of a configuration is read whole: a checkpoint or all of a run's, an export, a
routing record. Prints what was read, and a line for everything that is not as it was written.

Exit codes: 0; 1 a folder that is damaged or machines that are not in order; 2 a configuration or
data that cannot be trained on.
"""

import argparse
import math
import os
from pathlib import Path

from titan_moe.cli.command import (
    Answer,
    Command,
    add_nodes,
    add_ranks,
    check_meeting,
    job_arguments,
    positive,
)
from titan_moe.config.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(
        parser, default=None, says="ranks of the run; default: on each node the GPUs found, else 2"
    )
    add_nodes(parser)
    health = parser.add_argument_group("the machines")
    health.add_argument("--health", action="store_true", help="check them instead of the files")
    health.add_argument(
        "--slow",
        type=_above_zero,
        metavar="SHARE",
        help="name what is slower than this share of the others; default: 0.8, and 0.4 on CPUs "
        "and 0.25 for disks, which several processes share",
    )
    health.add_argument(
        "--memory-gib",
        type=_above_zero,
        help="memory of a rank to test; default: nine tenths of what is free on its GPU, 0.25 on "
        "a CPU",
    )
    health.add_argument(
        "--timeout", type=positive, default=120, help="seconds of each check; default: 120"
    )


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def run(options: argparse.Namespace) -> Answer:
    if options.health:
        return _health(options)
    if options.config is None and options.overrides and options.overrides[0][:1] != "-":
        return _audit(options.overrides)
    from titan_moe.config.stages import stage_jobs, stage_lines
    from titan_moe.data.sample import sample_data
    from titan_moe.data.tokenizer import load_tokenizer
    from titan_moe.models.hf import model_of_job
    from titan_moe.models.stats import total
    from titan_moe.runtime.launch import default_ranks
    from titan_moe.train import check_all

    nodes = options.nodes
    ranks = options.ranks or nodes * default_ranks(os.environ)
    job, notes = check_all(job_arguments(options), ranks, nodes, os.environ)
    found = {"ranks_per_node": ranks // nodes, "dump_folder": job.job.dump_folder}
    line = "nothing is wrong: {ranks_per_node} rank(s) on each machine, output in {dump_folder}"
    largest = max(stage.training.global_batch_size for _, stage in stage_jobs(job))
    samples = sample_data(
        job.training,
        job.validation,
        load_tokenizer(job.model.tokenizer_path),
        seed=job.debug.seed,
        global_batch_size=job.training.global_batch_size,
        largest_batch_size=largest,
    )
    model = model_of_job(job.model)
    parameters, active = sum(total(model)), round(total(model).active(model))
    found |= {"parameters": parameters, "active_parameters": active}
    says = f"{parameters:,} parameters, {active:,} active"
    stages = stage_lines(job)
    found |= {"notes": notes, "stages": stages, "data": samples}
    return Answer(found, [line.format(**found), *stages, says, *samples, *notes])


def _health(options: argparse.Namespace) -> Answer:
    from titan_moe.config.parse import load_job
    from titan_moe.runtime.launch import default_ranks, end_with_parent
    from titan_moe.runtime.torchrun import Nodes, start_ranks

    check_meeting(options)
    job = load_job(job_arguments(options))
    folder = Path(job.job.dump_folder)
    if "RANK" in os.environ:
        end_with_parent()
        from titan_moe.health.check import Settings, end_with_verdict

        saves = folder / job.checkpoint.folder  # May be another disk.
        saves = saves if saves.is_dir() else folder
        settings = Settings(saves, options.timeout, options.slow, options.memory_gib)
        end_with_verdict(job.comm, settings, os.environ, as_json=options.json)
    nodes = Nodes(options.nodes, options.node_rank, options.endpoint)
    ranks = options.ranks or nodes.number * default_ranks(os.environ)
    if ranks % nodes.number:
        raise ConfigError([f"--ranks {ranks} must be a multiple of --nodes {nodes.number}"])
    chosen = {"--slow": options.slow, "--memory-gib": options.memory_gib}
    words = ["check", "--health", "--timeout", str(options.timeout), *["--json"] * options.json]
    for name, value in chosen.items():
        words += [] if value is None else [name, str(value)]
    code = start_ranks(
        [*words, *job_arguments(options)],
        ranks=ranks // nodes.number,
        nodes=nodes,
        folder=folder,
        stop_timeout_s=None,
        environment=os.environ,
    )
    return Answer(exit_code=code)


def _audit(names: list[str]) -> Answer:
    from titan_moe.checkpoint.audit import audit

    audits = [audit(Path(name)) for name in names]
    found = {"whole": [line for each in audits for line in each.whole]}
    found["damaged"] = [line for each in audits for line in each.problems]
    lines = [f"{how}: {line}" for how in found for line in found[how]]
    return Answer(found, lines, exit_code=1 if found["damaged"] else 0)


COMMAND = Command(run, add_arguments, overrides=True, ends_at_once=True)
