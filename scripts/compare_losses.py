"""Is it still the same training? Two runs side by side, and a verdict.

    python scripts/compare_losses.py CONFIG --baseline revision=main           # my change
    python scripts/compare_losses.py CONFIG --candidate layout=tp=2,ep=2       # another layout
    python scripts/compare_losses.py CONFIG --candidate "--optimizer.lr 1e-3"  # any key
    python scripts/compare_losses.py --baseline outputs/a --candidate outputs/b --noise outputs/c*
    python scripts/compare_losses.py --baseline tests/goldens/qwen3            # a golden file
    python scripts/compare_losses.py CONFIG --update-golden tests/goldens/mine --reason "..."

A side is "revision=REV config=FILE ranks=N layout=AXIS=N,... --table.key value ...", each word left
out as the other options have it; or a finished run's folder (metrics.jsonl, TensorBoard); or a
golden. Sides are trained by their own run_train.sh from one seed checkpoint. Where their bits
differ, harmless repeats of the baseline (rows in another order, other layouts) measure how much
rounding alone may do.

Exit codes: 0 identical bits; 3 inside the noise band; 1 different; 5 not identical, and no repeats
to judge by; 2 cannot be compared, or no such thing; 4 a side failed; 130 interrupted: the same
command goes on. The output folder gets report.html, report.png, comparison.json and every run.
"""

import argparse
import sys
from pathlib import Path

from titan_moe.verify.compare.arguments import add_side_arguments, answer, read_sides
from titan_moe.verify.compare.launch import Launcher, workplace
from titan_moe.verify.compare.runner import Plan, compare, update_golden
from titan_moe.verify.report.comparison import write_comparison


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_side_arguments(parser)
    parser.add_argument("--repeats", type=int, default=24, help="of the baseline; default: 24")
    parser.add_argument(
        "--noise", nargs="+", type=Path, default=[], metavar="RUN", help="finished repeats"
    )
    parser.add_argument("--norms", action="store_true", help="compare every parameter's norm")
    parser.add_argument(
        "--routing", action="store_true", help="count routings that flip; judge without them too"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/comparison"))
    parser.add_argument("--update-golden", type=Path, metavar="FOLDER")
    parser.add_argument("--reason", default="", help="why the golden changes")
    options = parser.parse_args(argv)
    return answer(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    plan, launcher = _plan(options), Launcher(options.out)
    with workplace(options.out):
        if options.update_golden is not None:
            path = update_golden(plan, launcher, options.update_golden, options.reason, print)
            print(f"golden: {path}")
            return 0
        comparison = compare(plan, launcher)
    print("\n".join(comparison.lines()))
    for path in write_comparison(comparison, options.out):
        print(path)
    return comparison.verdict.exit_code


def _plan(options: argparse.Namespace) -> Plan:
    baseline, candidate = read_sides(options)
    return Plan(
        title=f"{options.candidate or 'working tree'} against {options.baseline or 'working tree'}",
        baseline=baseline,
        candidate=candidate,
        num_control_runs=options.repeats,
        steps=options.steps,
        control_layouts=options.harmless,
        control_paths=options.noise,
        norms=options.norms,
        routing=options.routing,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
