"""Arguments of the commands that compare two trainings."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_moe.cli.command import add_ranks, not_negative, positive

if TYPE_CHECKING:
    from titan_moe.verify.compare.trial import Trial


def add_arguments(parser: argparse.ArgumentParser, *, repeats: int) -> None:
    """Adds the arguments of two runs and their control runs."""
    parser.add_argument("--baseline", default="", metavar="RUN", help="default: the working tree")
    parser.add_argument("--candidate", default="", metavar="RUN", help="default: the working tree")
    parser.add_argument("--steps", type=positive, help="default: the configuration's")
    parser.add_argument(
        "--repeats", type=not_negative, default=repeats, help="control runs; default: %(default)s"
    )
    parser.add_argument(
        "--control-layouts", nargs="+", default=[], metavar="LAYOUT", help="layouts of control runs"
    )
    add_ranks(parser, says="ranks of each run; default: the GPUs found, else 2")


def read_trial(options: argparse.Namespace, **more: Any) -> "Trial":
    """Returns what to compare; raises ConfigError.

    Args:
        more: fields of the trial that these arguments do not have.
    """
    from titan_moe.config.named import find_config
    from titan_moe.verify.compare.run_spec import RunSpec, existing, parse_overrides
    from titan_moe.verify.compare.trial import trial_of

    config = None if options.config is None else Path(find_config(options.config))
    return trial_of(
        f"{options.candidate or 'working tree'} against {options.baseline or 'working tree'}",
        RunSpec(
            config=config and existing(config, "--config "),
            ranks=options.ranks,
            overrides=parse_overrides(options.overrides),
        ),
        options.baseline,
        options.candidate,
        num_control_runs=options.repeats,
        steps=options.steps,
        control_layouts=options.control_layouts,
        **more,
    )
