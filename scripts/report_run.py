"""Curves, expert load, layouts and configurations of one or several runs, as a page and a picture.

    python scripts/report_run.py outputs
    python scripts/report_run.py outputs/a outputs/b --out outputs/report

A run is its folder, its metrics.jsonl or a folder of TensorBoard events; it may still be going on.
Writes report.html, which loads nothing, and report.png into --out, or else into the first run's
folder.
"""

import argparse
import sys
from pathlib import Path

from titan_moe.config.errors import ConfigError
from titan_moe.runtime.failure import print_errors


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="its folder")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: the first run's")
    parser.add_argument("--title", help="default: the runs' names")
    options = parser.parse_args(argv)
    try:
        _report(options)
    except ConfigError as error:
        print_errors(error.lines)
        return 2
    return 0


def _report(options: argparse.Namespace) -> None:
    from titan_moe.verify.compare.records import read_run
    from titan_moe.verify.report.png import runs_png
    from titan_moe.verify.report.runs import runs_page
    from titan_moe.verify.report.words import distinct_names

    lines, runs = [], []
    for path in options.runs:
        if not path.exists():
            lines.append(f"{path}: no such folder")
            continue
        try:
            runs.append(read_run(path))
        except ConfigError as error:
            lines += error.lines
    if lines:
        raise ConfigError(lines)
    runs = distinct_names(runs)
    first = options.runs[0]
    out = options.out or (first if first.is_dir() else first.parent)
    if out.exists() and not out.is_dir():
        raise ConfigError([f"--out {out}: is a file; name a folder"])
    out.mkdir(parents=True, exist_ok=True)
    title = options.title or ", ".join(run.name for run in runs)
    page, picture = out / "report.html", out / "report.png"
    page.write_text(runs_page(title, runs), encoding="utf-8")
    runs_png(runs, picture)
    print(page)
    print(picture)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
