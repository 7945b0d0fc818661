"""Every package that titan_moe imports is one that pyproject.toml names."""

import ast
import re
import sys
from importlib import metadata
from pathlib import Path

from tests.support.imports import imports_of
from tests.support.paths import REPO
from titan_moe.config.parse import tomllib

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


def _dependencies() -> list[str]:
    table = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    dependencies: list[str] = table["project"]["dependencies"]
    return dependencies


def test_imported_packages_are_dependencies() -> None:
    assert undeclared(REPO, _dependencies()) == set()


def test_missing_dependency_is_found() -> None:
    assert undeclared(REPO, [line for line in _dependencies() if "tomli-w" not in line]) == {
        "tomli_w"
    }
