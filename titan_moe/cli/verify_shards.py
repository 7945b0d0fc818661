"""Check the shards, meshes and process groups of layouts too large to run here.

    titan-moe verify shards                       all of 16, 32 and 64 ranks
    titan-moe verify shards --ranks 128 --sample 50 --seed 1

In a fake world, two ranks of each layout lay the model out as in training, without memory. Shards,
meshes and process groups are compared with arithmetic: each rank holds its part of each parameter,
and process groups are the fewest.

Exit codes: 0; 1 a layout does not pass; 2 a wrong argument; 4 it failed; 70 an error in titan_moe.
"""

import argparse
import os
import time

from titan_moe.cli.command import (
    Answer,
    Command,
    add_out,
    add_ranks,
    add_seed,
    make_folder,
    positive,
    write_json,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(parser, default=[16, 32, 64], says="sizes of worlds; default: 16 32 64")
    parser.add_argument("--sample", type=positive, metavar="N", help="N layouts of each size")
    parser.add_argument(
        "--workers", type=positive, default=os.cpu_count(), help="processes; default: %(default)s"
    )
    add_seed(parser, default=1, says="of the sample")
    add_out(parser, default="outputs/shards.json", says="a JSON file; default: %(default)s")


def run(options: argparse.Namespace) -> Answer:
    from tqdm import tqdm

    from titan_moe.runtime.revision import running_code
    from titan_moe.verify.layouts.sweep import RankCheck, check_layouts, select_layouts, summary

    started = time.perf_counter()
    layouts = select_layouts(options.ranks, sample_size=options.sample, seed=options.seed)
    with tqdm(total=2 * len(layouts), unit="rank", dynamic_ncols=True) as bar:

        def show(result: RankCheck) -> None:
            bar.update()
            for line in result.problems:
                tqdm.write(f"{result.layout}: rank {result.rank}: {line}")

        checks = check_layouts(layouts, num_workers=options.workers, on_result=show)
    facts = summary(checks, time.perf_counter() - started)
    results = {
        "summary": facts,
        "code": running_code(),
        "ranks": [one._asdict() for one in checks],
    }
    make_folder(options.out.parent)
    write_json(options.out, results)
    line = (
        f"{facts['passed']} of {facts['layouts']} layouts pass: {facts['parameters_compared']:,} "
        f"parameters compared on {facts['ranks']:,} ranks, at most "
        f"{facts['most_groups_of_a_rank']} process groups on any; {facts['seconds']:.0f} s; "
        f"{options.out}"
    )
    return Answer(results, [line], 0 if 0 < facts["passed"] == facts["layouts"] else 1)


COMMAND = Command(run, add_arguments, failed=4)
