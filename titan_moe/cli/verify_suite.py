"""Run a regression suite: comparisons one after another, one summary page, one exit code.

    titan-moe verify suite configs/suites/cpu.toml
    titan-moe verify suite configs/suites/8gpu.toml --dry-run

Every comparison is checked before the first training. --dry-run then prints the trainings of each,
and an estimate of their time, and ends.

Started again, a suite that was interrupted goes on: what has been trained under the same code and
configuration is not trained anew. The output folder gets summary.html and a folder for each
comparison.

Exit codes: 0 everything as expected; 1 something is not; 2 the suite cannot be read; 4 another
command writes to --out, or code was changed meanwhile; 70 an error in titan_moe; 130 interrupted:
the same command goes on.
"""

import argparse
from dataclasses import asdict, replace
from functools import partial
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
    parser.add_argument("--dry-run", action="store_true", help="count the trainings, start none")


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.verify.compare.forecast import Forecast
    from titan_moe.verify.compare.launch import workplace
    from titan_moe.verify.compare.suite import load_suite, prepare_suite, run_suite, suite_page

    suite = load_suite(options.suite, options.config)
    forecast = Forecast(for_h100=options.dry_run)
    out = options.out or Path("outputs") / f"regression_{options.suite.stem}"
    rows = []
    with workplace(out):
        runners = prepare_suite(suite, out, forecast, partial(print, " ", flush=True))
        if options.dry_run:
            return Answer(forecast.rows(), forecast.table())
        print(forecast.line(), flush=True)
        for row in run_suite(suite, runners):
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
