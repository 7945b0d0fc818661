"""The table of agreement with `transformers`: family x option x type.

    titan-moe verify parity --seeds 5 --only gpt_oss > parity.md

Prints markdown; with --json a record of each case, type and seed. Exit codes: 0; 1 a difference
exceeds its bound; 2 a wrong argument, or transformers is not installed; 4 it failed; 70 an error in
titan_moe.
"""

import argparse
from importlib.util import find_spec

from titan_moe.cli.command import Answer, Command, positive
from titan_moe.config.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=positive, default=5, help="seeds of each case; default: 5")
    parser.add_argument("--only", default="", help="cases whose name contains this")


def run(options: argparse.Namespace) -> Answer:
    if find_spec("transformers") is None:
        raise ConfigError("parity is agreement with transformers: pip install -e '.[dev]'")
    from titan_moe.verify.parity.table import compare_all, exceeds_a_bound, markdown, records

    found = compare_all(options.only, options.seeds)
    if not found:
        raise ConfigError(f"--only {options.only}: no case has that in its name")
    return Answer(records(found), [markdown(found, options.seeds)], int(exceeds_a_bound(found)))


COMMAND = Command(run, add_arguments, failed=4)
