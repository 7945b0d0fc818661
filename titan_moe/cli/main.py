"""titan-moe COMMAND: find the command, import its module alone, and run it."""

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NoReturn

from titan_moe.cli.command import Command
from titan_moe.runtime.errors import print_errors
from titan_moe.runtime.log import outlive_readers, reader_has_left

COMMANDS = {
    "train": "train a model on the GPUs of this machine",
    "check": "check a configuration and its data, without a GPU",
    "generate": "let a model continue a text",
    "tokenize": "write a pre-tokenised copy of a dataset",
    "plan": "find the fastest layouts that fit some GPUs, by arithmetic",
    "memory": "estimate what a configuration keeps on each GPU",
    "config init": "start a TOML file for a model family and a number of GPUs",
    "config schema": "write the JSON schema of the TOML files",
    "hf import": "make a checkpoint of a Hugging Face folder",
    "hf export": "make a Hugging Face folder of a checkpoint",
    "routes import": "make a routing record of an inference engine's routed_experts",
    "hf merge": "make a Hugging Face folder of adapters and their base",
    "verify gradients": "every gradient of many layouts against one process, in float64",
    "verify losses": "compare two trainings, with a verdict",
    "verify localize": "the first tensor that differs between two trainings",
    "verify suite": "a list of comparisons, and one summary",
    "verify parity": "logits, losses and gradients against transformers",
    "verify foreign": "a step of another program, judged by one process here",
    "verify shards": "shards, meshes and process groups of up to thousands of ranks",
    "report run": "curves, expert load and configuration of runs, as a page",
    "report bench": "speed of runs beside published figures, as a card",
    "report profile": "where a profiled step's time goes",
    "report hang": "who waited where when a run hung, and who never came",
    "report batch": "a step's sequences, token by token, as a page",
    "simulate step": "communication and memory of one rank of a world of any size",
    "simulate collectives": "whether all ranks of a group issue the same collectives",
}
"""A command, and what it does in a line."""
_GROUPS = ("config", "hf", "report", "simulate")
"""First words whose commands are in one module; others have one, of their words joined by "_"."""
_PIPE_CLOSED = 141
"""The exit code of a command that the end of its output's reader ended, as by SIGPIPE."""


def load_command(name: str) -> Command:
    """Imports the module of a command."""
    group, _, verb = name.partition(" ")
    if group in _GROUPS:
        command: Command = import_module(f"titan_moe.cli.{group}").COMMANDS[verb]
    else:
        command = import_module(f"titan_moe.cli.{name.replace(' ', '_')}").COMMAND
    return command


def main(argv: list[str]) -> int:
    """Runs a command; returns its exit code."""
    name = next((" ".join(argv[:n]) for n in (2, 1) if " ".join(argv[:n]) in COMMANDS), None)
    if name is not None:
        return load_command(name).main(name, argv[len(name.split()) :])
    if argv == ["--version"]:
        from titan_moe.runtime.revision import code_in_words, running_code

        print(f"titan_moe {code_in_words(running_code())}")
        return 0
    words = [word for word in argv if word not in ("-h", "--help")]
    known = [each for each in COMMANDS if each.split()[: len(words)] == words]
    if not known:
        print_errors([f"titan-moe {' '.join(words[:2])}: no such command: see titan-moe --help"])
        return 2
    print(f"usage: titan-moe {' '.join([*words, 'COMMAND'])} ...\n")
    for each in known:
        print(f"  {each:<22}{COMMANDS[each]}")
    print("\nEach has a --help of its own; titan-moe --version names the code that runs.")
    return 0 if words != argv else 2


def entry() -> NoReturn:
    """The process's own end: the console script and `python -m titan_moe`."""
    _refuse_another_checkout(os.environ)
    if sys.argv[1:2] == ["train"]:
        outlive_readers()
    try:
        code: Any = main(sys.argv[1:])
    except SystemExit as end:
        code = end.code
    except BrokenPipeError:
        if not reader_has_left():
            raise
        code = _PIPE_CLOSED
    reader_has_left()  # Python's own end would complain.
    sys.exit(code)


def _refuse_another_checkout(environment: Mapping[str, str]) -> None:
    """End with exit code 2 in a checkout whose package is not the one that Python has imported: an
    environment in which one clone is installed gives that clone's code to commands in another."""
    from titan_moe.runtime.revision import CHECKOUT, wanted_checkout

    wanted = wanted_checkout(environment)
    if wanted not in (None, CHECKOUT):
        line = f"this is a command of the checkout {wanted}, but Python imports titan_moe from"
        print_errors([f"{line} {CHECKOUT}: set PYTHONPATH={wanted}, or leave that folder"])
        sys.exit(2)


if __name__ == "__main__":
    entry()
