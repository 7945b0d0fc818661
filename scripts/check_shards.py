"""Check the shards, meshes and process groups of layouts too large to run here.

    python scripts/check_shards.py                          all of 16, 32 and 64 ranks
    python scripts/check_shards.py --world-size 128 --sample 50 --seed 1

By arithmetic, on all ranks: each parameter's shards cover it exactly as often as they should, none
is empty that need not be, and process groups are the fewest. In a fake world, on two ranks of each
layout: the model is laid out as in training, without memory, and what comes of it compared with
that arithmetic. Results go to a JSON file. Exit code 1 if any layout does not pass.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--world-size", type=int, nargs="+", default=[16, 32, 64], help="default: 16 32 64"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="N layouts of each world size")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes; default: %(default)s"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/shards.json"), help="default: %(default)s"
    )
    return _check(parser.parse_args(argv))


def _check(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from titan_moe.simulate.sweep import LayoutResult, as_json, check_layouts, select_layouts

    started = time.perf_counter()
    layouts = select_layouts(options.world_size, sample_size=options.sample, seed=options.seed)
    with tqdm(total=len(layouts), unit="layout", dynamic_ncols=True) as bar:

        def show(result: LayoutResult) -> None:
            bar.update()
            for line in result.problems:
                tqdm.write(f"{result.layout}: {line}")

        checked = check_layouts(layouts, num_workers=options.workers, on_result=show)
    results = as_json(checked, time.perf_counter() - started)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    facts = results["summary"]
    print(
        f"{facts['passed']} of {facts['layouts']} layouts pass: {facts['parameters_compared']:,} "
        f"parameters compared on {facts['ranks']:,} ranks, at most "
        f"{facts['most_groups_of_a_rank']} process groups on any; {facts['seconds']:.0f} s; "
        f"{options.out}"
    )
    return 0 if 0 < facts["passed"] == facts["layouts"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
