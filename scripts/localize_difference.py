"""Where do two runs part? The first module, tensor, expert and tokens that differ beyond rounding.

    python scripts/localize_difference.py CONFIG --baseline revision=main         # my change
    python scripts/localize_difference.py CONFIG --candidate layout=tp=2,ep=2     # another layout
    python scripts/localize_difference.py --baseline outputs/a --candidate outputs/b  # run again
    python scripts/localize_difference.py CONFIG --candidate layout=tp=2 --step 40

Sides are written as for compare_losses.py. Both are trained to find the first step whose figures
differ (or --step says it); then both make that step from the baseline's state, and everything is
captured: rows, outputs of modules, gradients, updates. The first place in causal order that differs
by more than harmless repeats of the baseline do (rows in another order, another layout) is named,
with both norms. Finished runs are trained again, from their config.toml, by this code.

Exit codes: 1 a place is named; 0 identical bits; 3 other bits, and nothing beyond rounding; 2
cannot be run, or no such thing; 4 a side failed; 130 interrupted: the same command goes on.
"""

import argparse
import json
import sys
from pathlib import Path

from titan_moe.verify.compare.arguments import add_side_arguments, answer, positive, read_sides
from titan_moe.verify.compare.bisect import bisect
from titan_moe.verify.compare.launch import Launcher, workplace
from titan_moe.verify.compare.runner import Plan


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_side_arguments(parser)
    parser.add_argument("--step", nargs="+", type=positive, default=[], help="where to look")
    parser.add_argument("--repeats", type=int, default=2, help="harmless captures; default: 2")
    parser.add_argument("--out", type=Path, default=Path("outputs/localization"))
    options = parser.parse_args(argv)
    return answer(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    baseline, candidate = read_sides(options)
    plan = Plan(
        title="",
        baseline=baseline,
        candidate=candidate,
        num_control_runs=options.repeats,
        steps=options.steps,
        control_layouts=options.harmless,
    )
    with workplace(options.out):
        found = bisect(plan, Launcher(options.out), options.step)
    lines = [line for each in found for line in each.lines()] or ["identical bits"]
    print("\n".join(lines))
    told = [{"step": each.step, "named": each.named, "lines": each.lines()} for each in found]
    (options.out / "finding.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    if not found:
        return 0
    return 1 if any(each.named for each in found) else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
