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
    parser.add_argument(
        "--model", metavar="HF_FOLDER", type=path_of, required=True, help="the weights before it"
    )
    parser.add_argument(
        "--dtype",
        choices=["float64", "float32"],
        default="float64",
        help="computes in it; default: %(default)s",
    )


def run(options: argparse.Namespace) -> Answer:
    import torch

    from titan_moe.verify.foreign.judge import judge

    try:
        parts = judge(options.folder, options.model, getattr(torch, options.dtype))
    except RunError as error:
        raise ConfigError(str(error)) from None
    lines = [line for part in parts for line in part.lines()]
    data = [
        part._asdict() | {"tensors": [each._asdict() for each in part.tensors]} for part in parts
    ]
    return Answer(data, lines, int(not all(part.agrees for part in parts)))


COMMAND = Command(run, add_arguments, failed=4)
