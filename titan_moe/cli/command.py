"""Provides what all commands share: options, --json, errors as lines, exit codes, signals."""

import argparse
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from titan_moe.config.errors import ConfigError
from titan_moe.config.named import as_path
from titan_moe.runtime.errors import CRASHED, RunError, print_errors
from titan_moe.runtime.files import write_whole
from titan_moe.runtime.launch import Launch, end_on_signals
from titan_moe.runtime.log import reader_has_left

if TYPE_CHECKING:
    from titan_moe.config.job_config import JobConfig

_USAGE, _INTERRUPTED = 2, 130
_MOST, _MOST_RANKS = 10**9, 10**6


@dataclass(frozen=True)
class Answer:
    """Holds the result of a command."""

    data: Any = None
    """Value that --json prints; None where there is no --json."""
    lines: Sequence[str] = ()
    """Lines that are printed without --json."""
    exit_code: int = 0


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument as any other mistake: one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


@dataclass(frozen=True)
class Command:
    """One command: its arguments, and the call that they are for.

    Modules of commands import what is heavy inside `run`, so that --help is quick.
    """

    run: Callable[[argparse.Namespace], Answer]
    """Runs the command. The namespace has `json`, and `overrides`: arguments unknown to the parser.
    Progress may be printed; ConfigError and RunError may be raised."""
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    overrides: bool = False
    """Takes --config FILE and --table.key value too."""
    help_of_keys: bool = False
    """The help lists configuration keys, and `run` prints it."""
    resumable: bool = False
    """The same command continues an interrupted run."""
    ends_at_once: bool = False
    """A signal ends it without any Python, as a rank that waits in a collective needs; else it is
    a KeyboardInterrupt."""
    failed: int = 1
    """The exit code of a run that failed; another one where 1 is a verdict."""

    @property
    def help(self) -> str:
        """The docstring of `run`, or else of its module."""
        return inspect.getdoc(self.run) or sys.modules[self.run.__module__].__doc__ or ""

    def main(self, name: str, argv: list[str]) -> int:
        """Parses, runs, prints, and returns the exit code. Of torchrun's ranks the first prints."""
        signals = self._handle_signals()
        is_first = Launch.from_environment(os.environ).rank == 0
        try:
            options = self._parse(name, argv)
            with redirect_stdout(sys.stderr) if options.json else nullcontext():
                answer = self.run(options)
        except (Exception, KeyboardInterrupt) as error:
            # Python drops a KeyboardInterrupt in a finalizer. An error after it is its consequence,
            # such as that of a worker that the same Ctrl-C has ended.
            if isinstance(error, BrokenPipeError) and reader_has_left():
                raise
            if isinstance(error, Exception) and not signals:
                return self._explain(error, is_first)
            more = "; the same command goes on where it stopped" if self.resumable else ""
            print(f"\ninterrupted{more}", file=sys.stderr)
            return _INTERRUPTED
        text = json.dumps(answer.data, indent=1) if options.json else "\n".join(answer.lines)
        if text and is_first:
            with suppress(BrokenPipeError):
                print(text)
        return answer.exit_code

    def _explain(self, error: Exception, is_first: bool) -> int:
        """Print one line for each mistake that the user can mend; returns the exit code."""
        is_mistake = isinstance(error, ConfigError)
        if not (is_mistake or isinstance(error, (RunError, OSError))):
            traceback.print_exception(error)
            return CRASHED
        if is_first:
            first, *more = str(error).splitlines() or [type(error).__name__]
            print_errors(error.lines if isinstance(error, ConfigError) else [first])
            if isinstance(error, RunError):  # The last output of a failed process.
                print("".join(f"{line}\n" for line in more), end="", file=sys.stderr)
        return _USAGE if is_mistake else self.failed

    def _parse(self, name: str, argv: list[str]) -> argparse.Namespace:
        parser = Parser(
            prog=f"titan-moe {name}",
            description=self.help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=not self.help_of_keys,
            epilog="Every --table.key: titan-moe train --help." if self.overrides else None,
        )
        if self.overrides:
            parser.add_argument(
                "--config",
                "--job.config_file",
                metavar="FILE",
                help="TOML file to start from, or the name of one of titan_moe's own",
            )
        self.add_arguments(parser)
        parser.set_defaults(json=False)
        if not self.help_of_keys:
            parser.add_argument("--json", action="store_true", help="print the result as JSON")
        options, rest = parser.parse_known_args(argv)
        if rest and not self.overrides:
            raise ConfigError(f"{parser.prog}: unknown argument {rest[0]!r}: see --help")
        options.overrides = rest
        return options

    def _handle_signals(self) -> list[int]:
        """Returns a list that receives the signals as they come."""
        signals: list[int] = []

        def interrupt(number: int, frame: object) -> None:
            signals.append(number)
            raise KeyboardInterrupt

        if self.ends_at_once:
            end_on_signals()
            return signals
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # By nohup, or a script's `&`.
                signal.signal(number, interrupt)
        return signals


def job_arguments(options: argparse.Namespace) -> list[str]:
    """Returns the command line of a configuration: its file and its overrides."""
    file = [] if options.config is None else ["--job.config_file", options.config]
    return [*file, *options.overrides]


def job_of(options: argparse.Namespace) -> "JobConfig":
    """Loads the configuration of a command line."""
    from titan_moe.config.parse import load_job

    return load_job(job_arguments(options))


def add_ranks(
    parser: argparse.ArgumentParser, *, says: str, default: int | list[int] | None = None
) -> None:
    """Adds --ranks: one number, or several where the default is a list."""
    several = isinstance(default, list)
    parser.add_argument(
        "--ranks", type=_ranks, nargs="+" if several else None, default=default, help=says
    )


def add_seed(parser: argparse.ArgumentParser, *, default: int, says: str) -> None:
    """Adds --seed."""
    parser.add_argument(
        "--seed", type=not_negative, default=default, help=f"{says}; default: {default}"
    )


def add_out(
    parser: argparse.ArgumentParser, *, default: str | None, says: str, required: bool = False
) -> None:
    """Adds --out, the folder that the results go to."""
    parser.add_argument(
        "--out", type=path_of, default=default, metavar="PATH", help=says, required=required
    )


def add_out_file(parser: argparse.ArgumentParser, *, says: str, required: bool = False) -> None:
    """Adds --out, the file that the results go to, and --force."""
    says += "; replaces none without --force"
    add_out(parser, default=None, says=says, required=required)
    parser.add_argument("--force", action="store_true", help="replace the file of --out")


@contextmanager
def out_file(options: argparse.Namespace) -> Iterator[Callable[[str], None]]:
    """Yields what writes a text to --out, or nowhere without one.

    Takes the name before the results are there, which may last, and gives it back if they never
    are. Raises ConfigError where something of that name is, unless --force replaces it.
    """
    if options.out is None:
        yield lambda text: None
        return
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        if not (options.force and options.out.is_file()):
            options.out.open("x").close()
    except FileExistsError as error:
        remedy = "name another file" + ", or add --force" * options.out.is_file()
        raise ConfigError(f"--out {error.filename}: is there already: {remedy}") from None
    try:
        yield lambda text: write_whole(options.out, text)
    except BaseException:
        if not options.force:
            options.out.unlink()
        raise


def path_of(text: str) -> Path:
    """Reads an argument that names a file or a folder; ~ is the home folder. Raises ConfigError."""
    try:
        return Path(as_path(text))
    except ValueError as error:
        raise ConfigError(f"{text[:120]}: {error}") from None


def positive(text: str) -> int:
    """Reads an argument that counts something."""
    return _whole(text, 1, _MOST, "a positive number")


def not_negative(text: str) -> int:
    """Reads an argument that counts something of which there may be none."""
    return _whole(text, 0, _MOST, "0 or more")


def _ranks(text: str) -> int:
    return _whole(text, 1, _MOST_RANKS, "a positive number")


def _whole(text: str, least: int, most: int, what: str) -> int:
    if not text.isdecimal() or len(text) > 20 or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text[:40]} must be {what}, at most {most}")
    return int(text)


def make_folder(path: Path) -> Path:
    """Makes a folder for results; raises ConfigError where a file lies."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--out {path}: is a file; name a folder")
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_json(path: Path, data: Any) -> None:
    """Writes results to a file."""
    write_whole(path, as_json(data))


def as_json(data: Any) -> str:
    """Returns results as the text of a file."""
    return json.dumps(data, indent=1) + "\n"
