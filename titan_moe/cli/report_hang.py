"""Say who waited where when a run hung, and who never came.

    titan-moe report hang outputs/RUN

FOLDER is a run's folder or a report in it (comm_traces/hang-*.json); of several the newest is read.
Prints the findings, and for each rank its position, its last collectives and its Python stacks.
Exit codes: 0; 2 there is no report.
"""

import argparse
from pathlib import Path

from titan_moe.cli.command import Answer, Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path)


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.debug.hang.reports import describe, read_report

    path, hang = read_report(options.folder)
    return Answer(hang, [str(path), *describe(hang)])


COMMAND = Command(run, add_arguments)
