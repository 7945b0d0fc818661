"""Curves, expert load, layouts and configurations of one or several runs, as a page and a picture.

    titan-moe report run outputs
    titan-moe report run outputs/a outputs/b --out outputs/report

A run is its folder, its metrics.jsonl or a folder of TensorBoard events; it may still be going on.
Writes report.html, which loads nothing, and report.png into --out, or else into the first run's
folder. Exit codes: 0; 1 the report cannot be written; 2 something is no run.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from titan_moe.cli.command import Answer, Command, add_out, make_folder
from titan_moe.config.errors import ConfigError

if TYPE_CHECKING:
    from titan_moe.verify.compare.records import RunRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="its folder")
    parser.add_argument("--title", help="default: the runs' names")
    add_out(parser, default=None, says="a folder; default: the first run's")


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.runtime.files import replacing, write_whole
    from titan_moe.verify.report.runs import runs_page, runs_png
    from titan_moe.verify.report.sections import distinct_names

    runs = distinct_names(_read(options.runs))
    first = options.runs[0]
    out = make_folder(options.out or (first if first.is_dir() else first.parent))
    title = options.title or ", ".join(run.name for run in runs)
    page, picture = out / "report.html", out / "report.png"
    write_whole(page, runs_page(title, runs))
    with replacing(picture) as aside:
        runs_png(runs, aside)
    return Answer([str(page), str(picture)], [str(page), str(picture)])


def _read(paths: list[Path]) -> "list[RunRecord]":
    """All runs; ConfigError with a line for each that is none."""
    from titan_moe.verify.compare.records import read_run

    lines, runs = [], []
    for path in paths:
        if not path.exists():
            lines.append(f"{path}: no such folder")
            continue
        try:
            runs.append(read_run(path))
        except ConfigError as error:
            lines += error.lines
    if lines:
        raise ConfigError(lines)
    return runs


COMMAND = Command(run, add_arguments)
