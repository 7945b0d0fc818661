"""How what a rank sends, holds and makes grows with the world, on one CPU core.

    titan-moe simulate scaling --ranks 8 64 1024 4096 --layers 4 --config FILE --out outputs/scaling

As simulate step, for each number of ranks: a rank's batch is one microbatch in every world, data
parallelism takes up the further ranks. The law that is checked: nothing per rank grows with the
world faster than the shard that it owns. --layers cuts the model, to be quicker (torch's FSDP cuts
every parameter into as many pieces as there are ranks). --out gets scaling.json and scaling.png.

Exit codes: 0; 1 the law is broken; 2 a configuration that cannot run; 70 an error in titan_moe.
"""

import argparse

from titan_moe.cli.command import (
    Answer,
    Command,
    add_out,
    add_ranks,
    job_arguments,
    make_folder,
    positive,
    write_json,
)

_WORLDS = [8, 64, 256, 1024]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(parser, default=_WORLDS, says="sizes of worlds; default: 8 64 256 1024")
    parser.add_argument("--rank", type=int, default=0, help="which rank; default: 0")
    parser.add_argument("--layers", type=positive, help="only the model's first")
    add_out(parser, default=None, says="a folder for figures and picture")


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.config.parse import load_job
    from titan_moe.runtime.errors import print_errors
    from titan_moe.simulate.rank_step import in_words, one_microbatch, rank_step, simulate
    from titan_moe.simulate.scaling import violations

    job = one_microbatch(load_job(job_arguments(options)))
    tasks = [
        rank_step(job, ranks, rank=options.rank, layers=options.layers) for ranks in options.ranks
    ]
    curve = []
    for facts in simulate(tasks):
        print(in_words(facts), end="\n\n", flush=True)
        curve.append(facts)
    data = [facts.as_json() for facts in curve]
    if options.out is not None:
        from titan_moe.simulate.scaling_plot import draw

        out = make_folder(options.out)
        write_json(out / "scaling.json", data)
        model = tasks[0][1]
        what = f"{job.model.name} {job.model.flavor}, {model.num_layers} layers"
        title = f"{what}: one rank, {curve[0].tokens:,} tokens a step"
        draw(curve, out / "scaling.png", title)
    broken = violations(curve)
    print_errors(broken)
    law = "nothing per rank grows with the world faster than the shard that it owns"
    return Answer(data, [] if broken else [law], int(bool(broken)))


COMMAND = Command(run, add_arguments, overrides=True, failed=4)
