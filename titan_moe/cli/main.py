"""titan-moe COMMAND: find the command, import its module alone, and run it."""

import sys
from importlib import import_module
from typing import NoReturn

from titan_moe.cli.command import Command
from titan_moe.runtime.failure import print_errors

COMMANDS = {
    "train": "train a model; ./run_train.sh starts it on all GPUs",
    "check": "check a configuration and its data, without a GPU",
    "generate": "let a model continue a text",
    "tokenize": "write a pre-tokenised copy of a dataset",
    "memory": "estimate what a configuration keeps on each GPU",
    "config schema": "write the JSON schema of the TOML files",
    "hf import": "make a checkpoint of a Hugging Face folder",
    "hf export": "make a Hugging Face folder of a checkpoint",
    "verify gradients": "every gradient of many layouts against one process, in float64",
    "verify losses": "two trainings side by side, and a verdict",
    "verify localize": "the first tensor that differs between two trainings",
    "verify suite": "a list of comparisons, and one summary",
    "verify parity": "logits, losses and gradients against transformers",
    "verify shards": "shards, meshes and process groups of up to thousands of ranks",
    "report run": "curves, expert load and configuration of runs, as a page",
    "report profile": "where a profiled step's time goes",
    "report failure": "which rank of a run failed first, and why",
    "simulate step": "communication and memory of one rank of a world of any size",
    "simulate scaling": "how both grow with the number of ranks",
}
"""A command, and what it does in a line; its module has its words joined by "_"."""


def main(argv: list[str]) -> int:
    """Run a command; returns its exit code."""
    name = next((" ".join(argv[:n]) for n in (2, 1) if " ".join(argv[:n]) in COMMANDS), None)
    if name is not None:
        module = import_module(f"titan_moe.cli.{name.replace(' ', '_')}")
        command: Command = module.COMMAND
        return command.main(name, module.__doc__ or "", argv[len(name.split()) :])
    words = [word for word in argv if word not in ("-h", "--help")]
    known = [each for each in COMMANDS if each.split()[: len(words)] == words]
    if not known:
        print_errors([f"titan-moe {' '.join(words[:2])}: no such command: see titan-moe --help"])
        return 2
    print(f"usage: titan-moe {' '.join([*words, 'COMMAND'])} ...\n")
    for each in known:
        print(f"  {each:<18}{COMMANDS[each]}")
    print("\nEach has a --help of its own.")
    return 0 if words != argv else 2


def entry() -> NoReturn:
    """The process's own end: the console script and `python -m titan_moe`."""
    sys.exit(main(sys.argv[1:]))
