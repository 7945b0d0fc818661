"""Check the shards, meshes and process groups of layouts too large to run here.

    titan-moe verify shards                       all of 16, 32 and 64 ranks
    titan-moe verify shards --ranks 128 --sample 50 --seed 1

By arithmetic, on all ranks: each parameter's shards cover it exactly as often as they should, none
is empty that need not be, and process groups are the fewest. In a fake world, on two ranks of each
layout: the model is laid out as in training, without memory, and what comes of it compared with
that arithmetic.

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
    from titan_moe.simulate.sweep import LayoutResult, as_json, check_layouts, select_layouts

    started = time.perf_counter()
    layouts = select_layouts(options.ranks, sample_size=options.sample, seed=options.seed)
    with tqdm(total=len(layouts), unit="layout", dynamic_ncols=True) as bar:

        def show(result: LayoutResult) -> None:
            bar.update()
            for line in result.problems:
                tqdm.write(f"{result.layout}: {line}")

        checked = check_layouts(layouts, num_workers=options.workers, on_result=show)
    results = {**as_json(checked, time.perf_counter() - started), "code": running_code()}
    make_folder(options.out.parent)
    write_json(options.out, results)
    facts = results["summary"]
    line = (
        f"{facts['passed']} of {facts['layouts']} layouts pass: {facts['parameters_compared']:,} "
        f"parameters compared on {facts['ranks']:,} ranks, at most "
        f"{facts['most_groups_of_a_rank']} process groups on any; {facts['seconds']:.0f} s; "
        f"{options.out}"
    )
    return Answer(results, [line], 0 if 0 < facts["passed"] == facts["layouts"] else 1)


COMMAND = Command(run, add_arguments, failed=4)
