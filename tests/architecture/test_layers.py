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

# A module belongs to the longest name here that it starts with, and imports that layer or those
# below.
_LAYERS = {
    "config": 0,
    "config.checks": 4,
    "runtime": 0,
    "ops": 0,
    "profiling.regions": 0,
    "distributed.collectives": 0,
    "distributed.symmetric_memory": 0,
    "distributed.turns": 0,
    "moe": 1,
    "models": 2,
    "distributed": 2,
    "data": 3,
    "optim": 3,
    "checkpoint": 3,
    "metrics": 3,
    "profiling.profiler": 3,
    "distributed.memory": 4,
    "distributed.memory_table": 4,
    "distributed.parallelize": 4,
    "distributed.policies": 4,
    "debug": 5,
    "metrics.run_log": 5,
    "bad_steps": 5,
    "train_data": 5,
    "train_step": 5,
    "trainer": 5,
    "generate": 5,
    "load_checks": 6,
    "train": 6,
    "profiling": 6,
    "simulate": 6,
    "checkpoint.audit": 6,
    "verify.localize.capture": 5,
    "verify": 7,
    "cli": 8,
    "__main__": 8,
    "scripts": 8,
}
# Packages of one layer that know nothing of each other.
_SIBLINGS = [{"models", "distributed"}, {"data", "optim", "checkpoint", "metrics"}]
# Below the trainer a module takes the tables that it reads, not the sum of them.
_WHOLE_JOB = {"titan_moe.config.job_config", "titan_moe.config.job_config.JobConfig"}
_TORCH_FREE = ("config", "config.checks", "distributed.memory", "distributed.memory_table")
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
    here = _layer_name(ours)
    if here in _TORCH_FREE and imported.split(".")[0] == "torch":
        yield "imports torch"
    theirs = tuple(imported.split("."))
    if theirs[0] not in ("titan_moe", "scripts"):
        return
    there = _layer_name(theirs)
    if here is None or there is None:
        yield f"{'.'.join(ours if here is None else theirs)} has no layer"
        return
    if _LAYERS[there] > _LAYERS[here]:
        yield f"imports {imported}, which is above it"
    if here != there and any({here, there} <= siblings for siblings in _SIBLINGS):
        yield f"imports {imported}, its sibling"
    if imported in _WHOLE_JOB and 0 < _LAYERS[here] < 4:
        yield "imports the whole job: take the section"
    family = _family(theirs)
    if here == "models" and family not in (None, _family(ours)) and ours[-1] != "registry":
        yield f"imports {imported}, another family"


def _layer_name(parts: tuple[str, ...]) -> str | None:
    """The key of _LAYERS that rules a module, or a name in one."""
    inside = parts if parts[0] == "scripts" else parts[1:]
    names = (".".join(inside[:length]) for length in range(len(inside), 0, -1))
    return next((name for name in names if name in _LAYERS), None)


def _family(parts: tuple[str, ...]) -> str | None:
    """The model family that a module belongs to; None for what all families share."""
    return next((part for part in parts[2:3] if part in FAMILIES), None)


def test_the_repository_keeps_its_layers() -> None:
    assert violations(REPO) == []


PLANTED = [
    ("config/a.py", "def f():\n    from torch import nn", "imports torch"),
    ("ops/a.py", "from ..moe import layer", "above it"),
    ("moe/a.py", "import_module('titan_moe.train')", "above it"),
    ("distributed/a.py", "from titan_moe.models.decoder import Decoder", "its sibling"),
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


def test_imported_packages_are_dependencies_and_one_that_is_missing_is_found() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dependencies = project["dependencies"]
    assert undeclared(REPO, dependencies) == set()
    fewer = [line for line in dependencies if "tomli-w" not in line]
    assert undeclared(REPO, fewer) == {"tomli_w"}
