"""A file imports only downward, in no circle, from projects that pyproject.toml names, and stays
of a size to be read.

Read from the syntax trees, so that imports inside functions and under TYPE_CHECKING count too. The
layers are those of docs/architecture.md.
"""

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.imports import imports_of
from tests.support.paths import REPO
from titan_moe.config.parse import tomllib
from titan_moe.models.registry import FAMILIES

# A folder imports from itself and from the lines above its own: folders of one line know nothing of
# each other.
_LAYERS = (
    ("ops", "runtime"),
    ("config",),
    ("comm",),
    ("moe",),
    ("models", "distributed"),
    ("data", "optim", "checkpoint", "metrics"),
    ("checks",),
    ("parallelize",),
    ("planner",),
    ("debug", "profiling"),
    ("prepare",),
    ("training",),
    ("train",),
    ("simulate",),
    ("verify",),
    ("cli",),
    ("scripts", "__main__"),
)
_LAYER = {folder: number for number, folders in enumerate(_LAYERS) for folder in folders}
# Below the trainer a module takes the tables that it reads, not the sum of them.
_WHOLE_JOB = {"titan_moe.config.job_config", "titan_moe.config.job_config.JobConfig"}
_TAKE_TABLES = range(_LAYER["comm"], _LAYER["checks"])
_TORCH_FREE = (
    *("config.", "checks.", "planner.", "runtime.gpus."),
    *("parallelize.com", "parallelize.mem", "parallelize.pl", "parallelize.pol"),
)
_LONGEST_FILE = 400
# Fields and docstrings alone: every key of the TOML files is found in one place.
_MAY_BE_LONG = "titan_moe/config/job_config.py"
_LONGEST_FUNCTION = 60


def violations(repo: Path) -> list[str]:
    """One line for each broken rule in the repository."""
    found = []
    for path in sorted([*repo.glob("titan_moe/**/*.py"), *repo.glob("scripts/**/*.py")]):
        name = path.relative_to(repo).as_posix()
        tree = ast.parse(path.read_text())
        for problem in _size_problems(path, tree, may_be_long=name == _MAY_BE_LONG):
            found.append(f"{name}: {problem}")
        for imported in sorted(set(imports_of(tree, path.relative_to(repo)))):
            found += [f"{name}: {problem}" for problem in _import_problems(path, repo, imported)]
    return found


def _size_problems(path: Path, tree: ast.Module, *, may_be_long: bool) -> Iterator[str]:
    text = path.read_text()
    if path.name == "__init__.py" and text and path.parent.name != "titan_moe":
        yield "is not empty"
    if (lines := len(text.splitlines())) > _LONGEST_FILE and not may_be_long:
        yield f"has {lines} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > _LONGEST_FUNCTION:
                yield f"{node.name} has {lines} lines"


def _import_problems(path: Path, repo: Path, imported: str) -> Iterator[str]:
    ours = path.relative_to(repo).with_suffix("").parts
    here = _folder(ours)
    inside = ".".join(ours[1:])
    if imported.split(".")[0] == "torch" and f"{inside}.".startswith(_TORCH_FREE):
        yield "imports torch"
    theirs = tuple(imported.split("."))
    if theirs[0] not in ("titan_moe", "scripts"):
        return
    there = _folder(theirs)
    if not {here, there} <= _LAYER.keys():
        yield f"{'.'.join(theirs if here in _LAYER else ours)} has no layer"
        return
    if here != there and _LAYER[there] >= _LAYER[here]:
        yield f"imports {imported}, which is not below it"
    if imported in _WHOLE_JOB and _LAYER[here] in _TAKE_TABLES:
        yield "imports the whole job: take the section"
    family = _family(theirs)
    if here == "models" and family not in (None, _family(ours)) and ours[-1] != "registry":
        yield f"imports {imported}, another family"


def _folder(parts: tuple[str, ...]) -> str:
    """The folder of titan_moe, or the module beside these, that holds a module or a name in one;
    scripts are one folder."""
    return parts[0] if parts[0] == "scripts" else ".".join(parts[1:2])


def _family(parts: tuple[str, ...]) -> str | None:
    """The model family that a module belongs to; None for what all families share."""
    return next((part for part in parts[2:3] if part in FAMILIES), None)


def test_the_repository_keeps_its_layers() -> None:
    assert violations(REPO) == []


PLANTED = [
    ("config/a.py", "def f():\n    from torch import nn", "imports torch"),
    ("ops/a.py", "from ..moe import layer", "not below it"),
    ("moe/a.py", "import_module('titan_moe.train')", "not below it"),
    ("distributed/a.py", "from titan_moe.models.decoder import Decoder", "not below it"),
    ("data/a.py", "from titan_moe.config.job_config import Debug, JobConfig", "whole job"),
    ("models/qwen3/a.py", "from titan_moe.models.deepseek_v3 import config", "another family"),
    ("novel/a.py", "import titan_moe.config.parse", "no layer"),
    ("moe/__init__.py", "x = 1", "is not empty"),
    ("moe/a.py", "x = 1\n" * 401, "has 401 lines"),
    ("moe/a.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
]


@pytest.mark.parametrize(("path", "text", "problem"), PLANTED)
def test_planted_violation_is_found(tmp_path: Path, path: str, text: str, problem: str) -> None:
    file = tmp_path / "titan_moe" / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    (line,) = violations(tmp_path)
    assert line.startswith(f"titan_moe/{path}: ") and problem in line


# --- circles --------------------------------------------------------------------------------------


def import_graph(repo: Path) -> dict[str, set[str]]:
    """Returns the modules of titan_moe that each of them imports."""
    paths = [path.relative_to(repo) for path in (repo / "titan_moe").rglob("*.py")]
    names = {".".join(path.with_suffix("").parts): path for path in paths}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for imported in imports_of(ast.parse((repo / path).read_text()), path):
            # The name may end with one inside the module.
            graph[name] |= names.keys() & {imported, imported.rpartition(".")[0]}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Returns the modules of a circle, each of which the next one imports; empty without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_modules_import_each_other_in_no_circle() -> None:
    assert circle(import_graph(REPO)) == []


def test_circles_are_found_in_functions_and_through_several_modules(tmp_path: Path) -> None:
    folder = tmp_path / "titan_moe" / "x"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("from titan_moe.x import b")
    (folder / "b.py").write_text("def f():\n    from .c import name")
    (folder / "c.py").write_text("from os import path")
    assert circle(import_graph(tmp_path)) == []
    (folder / "c.py").write_text("import titan_moe.x.a")
    assert set(circle(import_graph(tmp_path))) == {f"titan_moe.x.{name}" for name in "abc"}


# --- other projects -------------------------------------------------------------------------------

# torch has the builds of Triton that it runs with, and says what is missing where there is none.
_OF_TORCH = {"triton"}
# `titan-moe verify parity`, float8, metrics services and tokenizers ask for these when used.
_OF_EXTRAS = {"transformers", "torchao", "wandb", "mlflow", "sentencepiece"}
# Kernels that take the place of torch's operations where they are installed.
_KERNELS = {"fla"}


def undeclared(repo: Path, dependencies: list[str]) -> set[str]:
    """Imported packages of other projects that no requirement brings."""
    required = {_normal(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in dependencies}
    projects = metadata.packages_distributions()
    known = {*sys.stdlib_module_names, "titan_moe", *_OF_TORCH, *_OF_EXTRAS, *_KERNELS}
    return {
        package
        for path in repo.glob("titan_moe/**/*.py")
        for name in imports_of(ast.parse(path.read_text()), path.relative_to(repo))
        if (package := name.split(".")[0]) not in known
        and not required & {package, *map(_normal, projects.get(package, []))}
    }


def _normal(project: str) -> str:
    return re.sub(r"[-_.]+", "-", project).lower()


def test_imported_packages_are_declared_dependencies() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dependencies = project["dependencies"]
    assert undeclared(REPO, dependencies) == set()
    fewer = [line for line in dependencies if "tomli-w" not in line]
    assert undeclared(REPO, fewer) == {"tomli_w"}
