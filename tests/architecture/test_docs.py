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
def test_what_the_pages_name_exists(rule: Rule) -> None:
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
    ("command", "problem"),
    [
        ("titan-moe memroy", "no such command"),
        ("titan-moe memory --rnaks 8", "--rnaks is no --table.key"),
        ("titan-moe verify gradients --rnaks 8", "--rnaks"),
        ("titan-moe memory --ranks many", "many"),
        ("echo a | titan-moe memory --training.stpes 8", "no key training.stpes"),
        ("NGPU=2 ./run_train.sh \\\n  --training.stpes=8", "no key training.stpes"),
        ("./run_train.sh --steps 8", "--steps is no --table.key"),
        ('titan-moe verify losses --candidate "--optimizer.rl 1"', "no key optimizer.rl"),
        ("torchrun -m titan_moe train --config a --optimizer.rl 1", "no key optimizer.rl"),
        ("python -m scripts.bench.no_such --json a", "no module scripts.bench.no_such"),
        ("./scripts/tset.sh", "no file ./scripts/tset.sh"),
        ("echo 'without an end", "a quotation without an end"),
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str, problem: str) -> None:
    (line,) = command_problems("a.md", f"words\n```bash\n{command}\n```\n", REPO)
    assert line.startswith("a.md:2: ") and problem in line


def test_commands_that_exist_are_silent() -> None:
    text = """```bash
    titan-moe --help
    titan-moe memory --ranks N --config FILE --training.steps=8  # a comment: titan-moe nothing
    NGPU=4 CONFIG_FILE=a.toml ./run_train.sh --checkpoint.enable --training.steps 20 > log 2>&1 &
    cat > a.toml <<'END'
    titan-moe nothing
    END
    titan-moe verify losses --baseline "ranks=1 --training.steps 8" --norms && ls
    sbatch --nodes 4 scripts/slurm_train.sh --training.steps 20
    python -m scripts.bench.soak
    ./scripts/test.sh --slow
    ```
    ```text
    titan-moe nothing
    ```
    """
    assert command_problems("a.md", re.sub("^    ", "", text, flags=re.MULTILINE), REPO) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a `titan_moe/moe/no_layer.py` file", "a.md:1: no titan_moe/moe/no_layer.py"),
        ("\n`tests/no_such/`", "a.md:2: no tests/no_such/"),
        ("`titan_moe/moe/{layer,no_router}.py`", "a.md:1: no titan_moe/moe/no_router.py"),
        ("`configs/<family>/no_such_*.toml`", "a.md:1: no configs/*/no_such_*.toml"),
        ("`titan_moe/moe/no_layer.py: MoE.forward`", "a.md:1: no titan_moe/moe/no_layer.py"),
    ],
)
def test_a_path_that_does_not_exist_is_found(text: str, problem: str) -> None:
    assert path_problems("a.md", text, REPO) == [problem]


def test_paths_that_exist_are_silent() -> None:
    text = (
        "`titan_moe/moe/layer.py`, `titan_moe/moe/{layer,router}.py: MoE`, `configs/`, `a/b.py`,"
        " `configs/<family>/*.toml`, `./scripts/test.sh --slow`\n```\n`titan_moe/nothing.py`\n```\n"
    )
    assert path_problems("a.md", text, REPO) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](no_such.md)", "a.md:1: no_such.md: no such file"),
        ("![a](docs/no_such.svg)", "a.md:1: docs/no_such.svg: no such file"),
        ('<img src="no_such.svg">', "a.md:1: no_such.svg: no such file"),
        ("[a](b.md#no-such)", "a.md:1: b.md#no-such: no such heading"),
        ("# A\n[a](#no-such)", "a.md:2: #no-such: no such heading"),
    ],
)
def test_a_link_to_nothing_is_found(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "a.md").write_text(text)
    (tmp_path / "b.md").write_text("# B\n")
    assert link_problems("a.md", text, tmp_path) == [problem]


def test_links_to_something_are_silent(tmp_path: Path) -> None:
    text = (
        "# One `two`, three\n[a](#one-two-three) [b](b.md#its-own) [c](https://example.org#x)"
        ' [d](b.md "title")\n```\n[e](no_such.md)\n```\n`[f](no_such.md)`'
    )
    (tmp_path / "a.md").write_text(text)
    (tmp_path / "b.md").write_text("# B { #its-own }\n")
    assert link_problems("a.md", text, tmp_path) == []
