"""What the documentation names exists: commands, keys, files of the repository, links, anchors."""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.support.docs_commands import command_problems
from tests.support.markdown import anchors, code_spans, links, pages
from tests.support.paths import REPO

_FOLDERS = ("titan_moe", "configs", "tests", "scripts", "docs")
_PATH = re.compile(rf"(?:\./)?((?:{'|'.join(_FOLDERS)})/[\w./{{}},*<>-]*)(?::[\w.: ]+)?$")
_TORCHTITANS = {"tests/assets/c4_test"}
"""Paths of torchtitan's repository, which its files name."""
_ELSEWHERE = re.compile(r"[a-z]+:")


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


Rule = Callable[[str, str, Path], list[str]]


@pytest.mark.parametrize("rule", [command_problems, path_problems, link_problems])
def test_commands_paths_and_links_of_pages_exist(rule: Rule) -> None:
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
    ],
)
def test_rules_find_planted_problems(rule: Rule, text: str, problem: str) -> None:
    (line,) = rule("README.md", text, REPO)
    assert problem in line
