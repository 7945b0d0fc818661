"""Arguments of the commands that compare two trainings."""

import argparse
from typing import TYPE_CHECKING

from titan_moe.cli.command import add_ranks, positive

if TYPE_CHECKING:
    from titan_moe.verify.compare.run_spec import RunSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of two runs."""
    parser.add_argument("--baseline", default="", metavar="RUN", help="default: the working tree")
    parser.add_argument("--candidate", default="", metavar="RUN", help="default: the working tree")
    parser.add_argument("--steps", type=positive, help="default: the configuration's")
    parser.add_argument(
        "--control-layouts", nargs="+", default=[], metavar="LAYOUT", help="of the control runs"
    )
    add_ranks(parser, default=None, says="of each run; default: the GPUs found, else 2")


def read_run_specs(options: argparse.Namespace) -> "tuple[RunSpec, RunSpec]":
    """Baseline and candidate; raises ConfigError."""
    from pathlib import Path

    from titan_moe.config.named import find_config
    from titan_moe.verify.compare.run_spec import RunSpec, existing, parse_overrides, parse_run_spec
    from titan_moe.verify.compare.runner import default_ranks

    common = RunSpec(
        config=None
        if options.config is None
        else existing(Path(find_config(options.config)), "--config "),
        ranks=options.ranks,
        overrides=parse_overrides(options.overrides),
    )
    ranks = default_ranks()
    return (
        parse_run_spec(options.baseline, common, default_ranks=ranks),
        parse_run_spec(options.candidate, common, default_ranks=ranks),
    )
