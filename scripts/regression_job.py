"""Run a regression suite: comparisons one after another, one summary page, one exit code.

    python scripts/regression_job.py suites/cpu.toml
    python scripts/regression_job.py suites/8gpu.toml --print-sbatch

Started again, a suite that was interrupted goes on: what has been trained under the same code and
configuration is not trained anew. Exit codes: 0 everything as expected; 1 something is not; 2 the
suite cannot be read; 130 interrupted.
"""

import argparse
import sys
from pathlib import Path

from titan_moe.verify.compare.arguments import answer
from titan_moe.verify.compare.code_trees import REPO
from titan_moe.verify.compare.launch import workplace
from titan_moe.verify.compare.suite import load_suite, plan_of, run_suite, sbatch, suite_page


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", type=Path, help="TOML file, such as suites/cpu.toml")
    parser.add_argument("--out", type=Path, help="default: outputs/regression_<suite's name>")
    parser.add_argument("--print-sbatch", action="store_true", help="print the Slurm command")
    options = parser.parse_args(argv)
    return answer(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    suite = load_suite(options.suite)
    if options.print_sbatch:
        print(sbatch(suite, options.suite, REPO))
        return 0
    for entry in suite.comparison:
        plan_of(entry)  # Everything misspelt is told before the first run.
    out = options.out or Path("outputs") / f"regression_{options.suite.stem}"
    rows = []
    with workplace(out):
        for row in run_suite(suite, out, lambda line: print(f"  {line}", flush=True)):
            rows.append(row)
            mark = "ok" if row.ok else "NOT OK"
            print(f"{mark}: {row.name}: {row.verdict} (expected {row.expected})", flush=True)
            if not row.ok:
                print(row.detail)
            page = suite_page(suite.description, rows)
            (out / "summary.html").write_text(page, encoding="utf-8")
    good = sum(row.ok for row in rows)
    print(f"{good} of {len(suite.comparison)} as expected; {out / 'summary.html'}")
    return 0 if good == len(suite.comparison) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
