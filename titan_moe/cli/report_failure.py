"""Which rank of a run failed first, and why: what run_train.sh prints after torchrun has failed.

    titan-moe report failure RECORDS LOG --endpoint HOST:PORT

RECORDS is the folder of TITAN_MOE_FAILURES, LOG what torchrun wrote to standard error.
Exit code: that of the run.
"""

import argparse
from pathlib import Path

from titan_moe.cli.command import Answer, Command
from titan_moe.runtime.failure import explain, print_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", metavar="RECORDS", type=Path)
    parser.add_argument("log", metavar="LOG", type=Path)
    parser.add_argument("--endpoint", default="", help="where the nodes were to meet")


def run(options: argparse.Namespace) -> Answer:
    lines, exit_code = explain(options.records, options.log, options.endpoint)
    print_errors(lines)
    return Answer({"lines": lines}, exit_code=exit_code)


COMMAND = Command(run, add_arguments)
