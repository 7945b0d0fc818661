"""Names in the documentation exist: commands, keys, files of the repository, links, anchors."""

import argparse
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.support.commands import run_command
from tests.support.markdown import anchors, code_spans, fences, links, pages
from tests.support.paths import REPO
from titan_moe.cli.command import Answer
from titan_moe.cli.main import COMMANDS, load_command
from titan_moe.config.parse import known_keys

_SHELLS = ("bash", "sh")
_SHELL_ENDS = "|&;<>()\n"
_TRAINS = ("run_train.sh", "slurm_train.sh")
_OVERRIDE = re.compile(r"--([a-z][\w]*(?:\.\w+)+)")
_FREE_KEYS = {"job.config_file"}
_LISTS = {"--stages"}  # The only key outside of the tables.

_FOLDERS = ("titan_moe", "configs", "tests", "scripts", "docs")
_PATH = re.compile(rf"(?:\./)?((?:{'|'.join(_FOLDERS)})/[\w./{{}},*<>-]*)(?::[\w.: ]+)?$")
_TORCHTITANS = {"tests/assets/c4_test"}
"""Paths of torchtitan's repository, which its files name."""
_STALE = "```diff\n--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-no such line\n+a\n```"
_ELSEWHERE = re.compile(r"[a-z]+:")


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
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SHELL_ENDS)
    lexer.whitespace, lexer.whitespace_split = " \t", True
    for is_end, words in groupby(lexer, lambda token: set(token) <= set(_SHELL_ENDS)):
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
    """Yields problems with the arguments of a `titan-moe` command, without running it."""
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
        # N may stand for a number.
        done = run_command(*name.split(), *("1" if word == "N" else word for word in rest))
    if done.returncode:
        yield done.stderr.strip()
    yield from _keys(overrides)
    for side in rest:
        if " " in side:
            yield from _keys(side.split())


def _keys(arguments: list[str]) -> Iterator[str]:
    for word in arguments:
        if word in ("--help", "-h", *_LISTS) or not word.startswith("--"):
            continue
        key = _OVERRIDE.match(word)
        if key is None:
            yield f"{word} is no --table.key"
        elif key[1] not in known_keys() and key[1] not in _FREE_KEYS:
            yield f"no key {key[1]}"


def path_problems(page: str, text: str, repo: Path) -> list[str]:
    """A line for each path of the repository, named as code, that is neither there nor written by
    an example of the page."""
    written = set(re.findall(r"<!-- file: \S+ (\S+) -->", text))
    return [
        f"{page}:{line}: no {path}"
        for line, code in code_spans(text)
        if (found := _PATH.match(code))
        for path in _expanded(found[1])
        if path not in _TORCHTITANS | written and not any(repo.glob(path.rstrip("/")))
    ]


def _expanded(path: str) -> list[str]:
    """The paths that `a/{b,c}/<d>` stands for, as patterns of a glob."""
    parts = re.split(r"\{(.*?)\}", re.sub(r"<.*?>", "*", path))
    choices = [part.split(",") if at % 2 else [part] for at, part in enumerate(parts)]
    return ["".join(each) for each in product(*choices)]


def link_problems(page: str, text: str, repo: Path) -> list[str]:
    """A line for each relative link whose file or anchor is not there."""
    found = []
    for line, target in links(text):
        name, _, anchor = target.partition("#")
        if _ELSEWHERE.match(target):
            continue
        path = (repo / page).parent / name if name else repo / page
        if not path.exists():
            found.append(f"{page}:{line}: {target}: no such file")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text()):
            found.append(f"{page}:{line}: {target}: no such heading")
    return found


def diff_problems(page: str, text: str, repo: Path) -> list[str]:
    """A line for each diff that does not apply to the repository, whose code has changed."""
    found = []
    for fence in fences(text):
        if fence.language == "diff":
            words = ["git", "apply", "--check", "-"]
            done = subprocess.run(words, cwd=repo, input=fence.text, capture_output=True, text=True)
            found += [f"{page}:{fence.line}: {line}" for line in done.stderr.splitlines()[:1]]
    return found


Rule = Callable[[str, str, Path], list[str]]


@pytest.mark.parametrize("rule", [command_problems, path_problems, link_problems, diff_problems])
def test_commands_paths_links_and_diffs_of_pages_are_valid(rule: Rule) -> None:
    found = []
    for path in pages():
        page = path.relative_to(REPO).as_posix()
        # Links inside the site are checked as the site is built.
        if rule is not link_problems or "/" not in page:
            found += rule(page, path.read_text(encoding="utf-8"), REPO)
    assert found == []


def test_pages_named_by_messages_exist() -> None:
    sources = [path.read_text() for path in REPO.glob("titan_moe/**/*.py")]
    named = {name for text in sources for name in re.findall(r"docs/[\w/-]+\.md(?:#[\w-]+)?", text)}
    for name in named:
        page, _, anchor = name.partition("#")
        assert not anchor or anchor in anchors((REPO / page).read_text()), name
        assert (REPO / page).is_file(), name


@pytest.mark.parametrize(
    ("rule", "text", "problem"),
    [
        (command_problems, "```bash\ntitan-moe memory --rnaks 8\n```", "--rnaks is no --table.key"),
        (command_problems, "```bash\nNGPU=2 ./run_train.sh --a.b=8\n```", "no key a.b"),
        (path_problems, "`titan_moe/moe/{layer,no_router}.py`", "no titan_moe/moe/no_router.py"),
        (link_problems, "# A\n[a](#no-such)", "#no-such: no such heading"),
        (link_problems, "[a](no_such.md)", "no_such.md: no such file"),
        (diff_problems, _STALE, "error: patch failed: README.md:1"),
    ],
)
def test_documentation_rules_find_planted_problems(rule: Rule, text: str, problem: str) -> None:
    (line,) = rule("README.md", text, REPO)
    assert problem in line
