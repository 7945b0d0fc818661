"""What the command lines of comparisons have in common."""

import argparse
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.failure import print_errors
from titan_moe.verify.compare.launch import TrainingError
from titan_moe.verify.compare.run_spec import (
    RunSpec,
    existing,
    parse_overrides,
    parse_run_spec,
    split_words,
)
from titan_moe.verify.compare.runner import default_ranks

_OWN_FAULT = 70  # Not 1, which says that two runs differ.


def add_side_arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG, the two sides, and what they share."""
    parser.add_argument("config", nargs="?", type=Path, help="TOML file of both sides")
    parser.add_argument("--baseline", default="", help="default: the working tree")
    parser.add_argument("--candidate", default="", help="default: the working tree")
    parser.add_argument("--steps", type=positive, help="default: the configuration's")
    parser.add_argument("--ranks", type=positive, help="default: the GPUs found, else 2")
    parser.add_argument("--set", default="", help="keys of both sides, as one word")
    parser.add_argument(
        "--harmless", nargs="+", default=[], metavar="LAYOUT", help="layouts of the repeats"
    )


def read_sides(options: argparse.Namespace) -> tuple[RunSpec, RunSpec]:
    """Baseline and candidate; raises ConfigError."""
    common = RunSpec(
        config=None if options.config is None else existing(options.config, "CONFIG "),
        ranks=options.ranks,
        overrides=parse_overrides(split_words(options.set)),
    )
    ranks = default_ranks()
    return (
        parse_run_spec(options.baseline, common, default_ranks=ranks),
        parse_run_spec(options.candidate, common, default_ranks=ranks),
    )


def positive(text: str) -> int:
    """An argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a positive number")
    return int(text)


def answer(run: Callable[[], int]) -> int:
    """Run, and return the exit code; what a user can mend is told in lines.

    2: cannot be run, or no such thing; 4: a side failed; 70: a fault of ours; 130: interrupted, or
    terminated: the runs that have ended are kept.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return run()
    except (TrainingError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    except ConfigError as error:
        print_errors(error.lines)
        return 2
    except (ValueError, OSError) as error:
        print_errors([str(error)])
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from the runs that have ended")
        return 130
    except Exception:
        traceback.print_exc()
        return _OWN_FAULT
