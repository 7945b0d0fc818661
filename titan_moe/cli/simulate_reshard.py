"""What it takes to move a model and its optimizer's moments to another layout in memory.

    titan-moe simulate reshard --from dp_shard=64,ep=8 --to dp_shard=16,tp=4,ep=8 --config FILE

Prints the bytes that move inside nodes and between them, the time that they take at the given
speeds, and the memory of a rank meanwhile: by arithmetic alone. A layout names every degree above
1. --out gets reshard.json and reshard.png, the bytes of each pair of ranks.

Exit codes: 0; 1 it failed; 2 a configuration that cannot run.
"""

import argparse

from titan_moe.cli.command import (
    Answer,
    Command,
    add_out,
    job_arguments,
    make_folder,
    positive,
    write_json,
)

# Of an H100: NVLink 4, and a port of 400 Gbit/s for each GPU. Latencies are of an all-to-all of
# NCCL, roughly; they matter for small models alone.
_INSIDE_GB_S, _BETWEEN_GB_S = 450, 50
_INSIDE_LATENCY_S, _BETWEEN_LATENCY_S = 2e-5, 5e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for option, says in (("--from", "what it leaves"), ("--to", "where it goes")):
        parser.add_argument(
            option, dest=option.strip("-") + "_layout", metavar="LAYOUT", required=True, help=says
        )
    parser.add_argument("--ranks-per-node", type=positive, default=8, help="default: 8")
    for option, default, says in (
        ("--inside", _INSIDE_GB_S, "GB/s of a rank within its node"),
        ("--between", _BETWEEN_GB_S, "GB/s of a rank to other nodes"),
    ):
        parser.add_argument(
            option,
            type=positive,
            metavar="GB",
            default=default,
            help=f"{says}, each way; default: {default}",
        )
    add_out(parser, default=None, says="a folder for figures and picture")


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.config.parse import load_job
    from titan_moe.distributed.sharding_moves import Link
    from titan_moe.models.hf import model_of_job
    from titan_moe.simulate.reshard import GB, Machine, reshard

    job = load_job(job_arguments(options))
    config = model_of_job(job.model)
    machine = Machine(
        options.ranks_per_node,
        Link(options.inside * GB, _INSIDE_LATENCY_S),
        Link(options.between * GB, _BETWEEN_LATENCY_S),
    )
    found = reshard(job, config, options.from_layout, options.to_layout, machine)
    if options.out is not None:
        from titan_moe.simulate.reshard_plot import draw

        out = make_folder(options.out)
        write_json(out / "reshard.json", found.as_json())
        title = f"{job.model.name} {job.model.flavor}, {config.num_layers} layers"
        draw(found, options.ranks_per_node, out / "reshard.png", title)
    return Answer(found.as_json(), found.in_words(machine))


COMMAND = Command(run, add_arguments, overrides=True)
