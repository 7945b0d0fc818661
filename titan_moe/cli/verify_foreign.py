"""Judge a step of another program: loss, gradients, norm and update beside one plain process here.

    titan-moe verify foreign STEP --model HF_FOLDER

STEP is a folder that the other program wrote, as docs/court.md says: its gradients by Hugging
Face's names, the batch, and foreign.json. The step begins with the weights of HF_FOLDER. The report
names each gradient that differs, and the mistake that explains it.

Exit codes: 0 all agrees; 1 something differs; 2 a wrong argument, or a folder that cannot be
compared; 4 it failed; 70 an error in titan_moe.
"""

import argparse

from titan_moe.cli.command import Answer, Command, path_of
from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="STEP", type=path_of, help="the other program's folder")
    weights = "the weights before the step"
    parser.add_argument("--model", metavar="HF_FOLDER", type=path_of, required=True, help=weights)
    types = ("float64", "float32")
    parser.add_argument("--dtype", choices=types, default=types[0], help="default: %(default)s")


def run(options: argparse.Namespace) -> Answer:
    from titan_moe.verify.foreign.judge import judge

    try:
        parts = judge(options.folder, options.model, options.dtype)
    except RunError as error:
        raise ConfigError(str(error)) from None
    lines = [line for part in parts for line in part.lines]
    agrees = all(part.agrees for part in parts)
    return Answer([part._asdict() for part in parts], lines, int(not agrees))


COMMAND = Command(run, add_arguments, failed=4)
