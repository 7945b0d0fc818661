"""The commands that a page names: whether they, their options and their keys exist."""

import argparse
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from unittest.mock import patch

from tests.support.commands import run_command
from tests.support.markdown import fences
from titan_moe.cli.command import Answer
from titan_moe.cli.main import COMMANDS, load_command
from titan_moe.config.parse import known_keys

_SHELLS = ("bash", "sh")
_ENDS = "|&;<>()\n"
_TRAINS = ("run_train.sh", "slurm_train.sh")
_OVERRIDE = re.compile(r"--([a-z][\w]*(?:\.\w+)+)")
_FREE_KEYS = {"job.config_file"}
_LISTS = {"--stages"}  # Of tables: the only key outside a table.


def command_problems(page: str, text: str, repo: Path) -> list[str]:
    """A line for each command, option or key in the page's shell blocks that does not exist."""
    found = []
    for fence in fences(text):
        if fence.language not in _SHELLS:
            continue
        for words in commands(fence.text):
            found += [
                f"{page}:{fence.line}: {shlex.join(words)}: {p}" for p in _problems(words, repo)
            ]
    return found


def commands(text: str) -> Iterator[list[str]]:
    """The words of each simple command of a shell script; here-documents are left out."""
    text = re.sub(r"<<-?\s*['\"]?(\w+)['\"]?.*?\n.*?\n\s*\1\n", "\n", text, flags=re.DOTALL)
    text = re.sub(r"(^|\s)#.*", r"\1", text.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_ENDS)
    lexer.whitespace, lexer.whitespace_split = " \t", True
    for is_end, words in groupby(lexer, lambda token: set(token) <= set(_ENDS)):
        if not is_end:
            yield list(words)


def _problems(words: list[str], repo: Path) -> Iterator[str]:
    for at, word in enumerate(words):
        rest = words[at + 1 :]
        if word == "titan-moe" or words[at - 1 : at + 1] == ["-m", "titan_moe"]:
            yield from _titan_moe(rest)
        elif word.rpartition("/")[2] in _TRAINS:
            yield from _keys(rest)
        elif words[at - 1 : at] == ["-m"] and word.partition(".")[0] in ("scripts", "tests"):
            module = repo / word.replace(".", "/")
            if not (module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()):
                yield f"no module {word}"
        elif at == 0 and word.startswith("./") and not (repo / word).is_file():
            yield f"no file {word}"


def _titan_moe(arguments: list[str]) -> Iterator[str]:
    """As `titan-moe` reads its arguments, without running what they are for."""
    name = next(
        (" ".join(arguments[:n]) for n in (2, 1) if " ".join(arguments[:n]) in COMMANDS), ""
    )
    if not name:
        if not set(arguments[:1]) <= {"--help", "--version"}:
            yield "no such command"
        return
    rest = arguments[len(name.split()) :]
    if {"-h", "--help"} & set(rest):
        return
    overrides: list[str] = []

    def run(options: argparse.Namespace) -> Answer:
        overrides.extend(options.overrides)
        return Answer()

    command = replace(load_command(name), run=run)
    with patch("titan_moe.cli.main.load_command", lambda _: command):
        done = run_command(*name.split(), *(_filled_in(word) for word in rest))
    if done.returncode:
        yield done.stderr.strip()
    yield from _keys(overrides)
    for side in rest:
        if " " in side:
            yield from _keys(side.split())


def _filled_in(word: str) -> str:
    """A number in the place of N, which may be given where a number is wanted."""
    return "1" if word == "N" else word


def _keys(arguments: list[str]) -> Iterator[str]:
    for word in arguments:
        if word in ("--help", "-h", *_LISTS) or not word.startswith("--"):
            continue
        key = _OVERRIDE.match(word)
        if key is None:
            yield f"{word} is no --table.key"
        elif key[1] not in known_keys() and key[1] not in _FREE_KEYS:
            yield f"no key {key[1]}"
