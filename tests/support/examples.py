"""The examples of the documentation: what is marked to be run, and running it as printed.

CONTRIBUTING.md says how a block is marked.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from tests.support.commands import run_command
from tests.support.markdown import Fence, comments, fences
from tests.support.paths import DEBUG_CONFIGS, REPO
from titan_moe.config.parse import tomllib
from titan_moe.runtime.process_pool import TIMEOUT_S

_KINDS = ("run", "file", "check")
_REGIONS = ("generated",)
_TRIED_RANKS = (1, 2, 4, 8, 16, 32, 64)
_CHECKOUT = (
    *(".gitignore", "LICENSE", "README.md", "pyproject.toml", "run_train.sh"),
    *("configs", "docs", "scripts", "tests", "titan_moe"),
)


@dataclass(frozen=True)
class Example:
    """A marked block of a page."""

    page: str
    line: int
    kind: str
    name: str
    option: str
    """"slow" of a run, the path of a file."""
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Group:
    """The examples of one name on one page, in order: they share a folder."""

    examples: tuple[Example, ...]

    @property
    def name(self) -> str:
        return f"{self.examples[0].page}:{self.examples[0].name}"

    @property
    def is_slow(self) -> bool:
        return any(each.kind == "run" and each.option == "slow" for each in self.examples)


def read_examples(page: str, text: str) -> tuple[list[Group], list[str]]:
    """The groups of a page, and a line for each mistake in its markers."""
    examples: list[Example] = []
    problems: list[str] = []
    marked = {fence.line - 1: fence for fence in fences(text) if fence.comment is not None}
    for line, words in comments(text):
        if problem := _mistake(words, marked.get(line)):
            problems.append(f"{page}:{line}: {problem}")
        elif (fence := marked.get(line)) is not None:
            kind, name, *option = words.replace(":", " ", 1).split()
            examples.append(Example(page, fence.line, kind, name, "".join(option), fence.text))
    groups = []
    for name in dict.fromkeys(each.name for each in examples):
        group = Group(tuple(each for each in examples if each.name == name))
        if all(each.kind == "file" for each in group.examples):
            problems.append(f"{group.examples[0].place}: {name} has files, and nothing that runs")
        groups.append(group)
    return groups, problems


def _mistake(words: str, fence: Fence | None) -> str | None:
    """Returns what is wrong with a comment that is or should be a marker."""
    found = re.match(r"(\w+):\s*(\S.*)$", words)
    if found is None:
        return f"a marker is written 'KIND: NAME', not {words!r}" if fence else None
    if found[1] in _REGIONS:
        return None
    if found[1] not in _KINDS:
        return f"unknown marker {found[1]!r}: it is one of {', '.join(_KINDS)}"
    return None if fence else f"no fenced block follows {words!r} on the next line"


def run_group(group: Group, folder: Path) -> None:
    """Write the files and run the blocks, in order; AssertionError names the block that fails.

    The working folder is a repository with one commit on `main`: a copy of this one's files.
    """
    checkout = folder / "titan_moe"
    if any(each.kind == "run" for each in group.examples):
        _make_checkout(checkout)
    checkout.mkdir(exist_ok=True)
    environment = _environment(folder, checkout)
    for example in group.examples:
        if example.kind == "file":
            path = checkout / example.option
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(example.text, encoding="utf-8")
        elif example.kind == "check":
            check_toml(example, checkout)
        else:
            _run_bash(example, checkout, environment)


def _run_bash(example: Example, folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", example.text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, (
        f"{example.place}: exit code {done.returncode} of\n{example.text}\n{done.stdout[-6000:]}"
    )


def check_toml(example: Example, folder: Path) -> None:
    """`titan-moe check` accepts the block, on top of the default run's file, for some number of
    ranks. Paths in it are below `folder`."""
    values = tomllib.loads((DEBUG_CONFIGS / "default.toml").read_text(encoding="utf-8"))
    for table, keys in tomllib.loads(example.text).items():
        values[table] = values.get(table, {}) | keys if isinstance(keys, dict) else keys
    path = folder / f"{example.name}.toml"
    path.write_text(tomli_w.dumps(values), encoding="utf-8")
    outputs = []
    back = Path.cwd()
    os.chdir(folder)
    try:
        for ranks in _TRIED_RANKS:
            done = run_command("check", "--config", path, "--ranks", ranks)
            if done.returncode == 0:
                return
            outputs.append(done.stderr)
    finally:
        os.chdir(back)
    raise AssertionError(
        f"{example.place}: refused on any number of ranks:\n{min(outputs, key=len)}"
    )


def _make_checkout(folder: Path) -> None:
    """A repository with one commit of the files that a user has."""
    folder.mkdir(parents=True)
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in _CHECKOUT:
        if (REPO / name).is_dir():
            shutil.copytree(REPO / name, folder / name, ignore=unwanted)
        else:
            shutil.copy2(REPO / name, folder / name)
    git = ["git", "-C", str(folder), "-c", "user.name=docs", "-c", "user.email=docs@localhost"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "-m", "as it is"]):
        subprocess.run([*git, *words], check=True)


def _environment(folder: Path, checkout: Path) -> dict[str, str]:
    """A user's whose active environment is this one, on the CPU; `titan-moe` is on the PATH."""
    programs = folder / "bin"
    programs.mkdir()
    command = programs / "titan-moe"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m titan_moe "$@"\n')
    command.chmod(0o755)
    left_out = ("CONFIG_FILE", "NGPU", "TITAN_MOE_CHECKOUT")
    mine = {name: value for name, value in os.environ.items() if name not in left_out}
    return mine | {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(checkout),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }


def examples_of(repo: Path, paths: list[Path]) -> Iterator[tuple[list[Group], list[str]]]:
    """`read_examples` of each page."""
    for path in paths:
        yield read_examples(path.relative_to(repo).as_posix(), path.read_text(encoding="utf-8"))
