"""Run a regression suite: comparisons one after another, one summary page, one exit code.

    titan-moe verify suite configs/suites/cpu.toml
    titan-moe verify suite configs/suites/seed_8.toml --config configs/deepseek_v3/16B_8gpu.toml

Started again, a suite that was interrupted goes on: what has been trained under the same code and
configuration is not trained anew. The output folder gets summary.html and a folder for each
comparison.

Exit codes: 0 everything as expected; 1 something is not; 2 the suite cannot be read; 70 an error in
titan_moe; 130 interrupted: the same command goes on.
"""

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from titan_moe.cli.command import Answer, Command, add_out, path_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "suite", metavar="SUITE", type=path_of, help="TOML file, such as configs/suites/cpu.toml"
    )
    parser.add_argument(
        "--config", type=path_of, metavar="FILE", help="train this model in every comparison"
    )
    add_out(parser, default=None, says="default: outputs/regression_<suite's name>")


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.verify.compare.launch import workplace
    from titan_moe.verify.compare.suite import entry_plan, load_suite, run_suite, suite_page

    suite = load_suite(options.suite, options.config)
    for entry in suite.comparison:
        entry_plan(entry)  # Everything misspelt is reported before the first run.
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
    good, total = sum(row.ok for row in rows), len(suite.comparison)
    line = f"{good} of {total} as expected; {out / 'summary.html'}"
    return Answer(
        [asdict(replace(row, runs=())) for row in rows], [line], 0 if good == total else 1
    )


COMMAND = Command(run, add_arguments, resumable=True, failed=4)
