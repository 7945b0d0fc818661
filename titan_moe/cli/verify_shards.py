"""Check the shards, meshes and process groups of layouts too large to run here.

    titan-moe verify shards                       all of 16, 32 and 64 ranks
    titan-moe verify shards --ranks 128 --sample 50 --seed 1

In a fake world, two ranks of each layout lay the model out as in training, without memory. Shards,
meshes and process groups are compared with arithmetic: each rank holds its part of each parameter.

Exit codes: 0; 1 a layout does not pass; 2 a wrong argument; 4 it failed; 70 an error in titan_moe.
"""

import argparse
import os

from titan_moe.cli.command import Answer, Command, add_ranks, add_seed, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks(parser, default=[16, 32, 64], says="sizes of worlds; default: 16 32 64")
    parser.add_argument("--sample", type=positive, metavar="N", help="N layouts of each size")
    parser.add_argument(
        "--workers", type=positive, default=os.cpu_count(), help="processes; default: %(default)s"
    )
    add_seed(parser, default=1, says="seed of the sample")


def run(options: argparse.Namespace) -> Answer:
    from tqdm import tqdm

    from titan_moe.runtime.log import progress
    from titan_moe.verify.layouts.sweep import check_layouts, select_layouts

    layouts = select_layouts(options.ranks, sample_size=options.sample, seed=options.seed)
    checks, failed = [], set()
    done = check_layouts(layouts, num_workers=options.workers)
    for check in progress(done, total=2 * len(layouts), unit="rank"):
        checks.append(check._asdict())
        for line in check.problems:
            failed.add(check.layout)
            tqdm.write(f"{check.layout}: rank {check.rank}: {line}")
    passed = len(layouts) - len(failed)
    compared = sum(check["num_parameters"] for check in checks)
    line = f"{passed} of {len(layouts)} layouts pass: {compared:,} parameters compared"
    return Answer(checks, [line], 0 if 0 < passed == len(layouts) else 1)


COMMAND = Command(run, add_arguments, failed=4)
