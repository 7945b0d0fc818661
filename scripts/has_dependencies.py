"""Checks that this Python has the packages of pyproject.toml: exit code 0 or 1. Imports none.

python scripts/has_dependencies.py [EXTRA]
"""

import sys
from importlib import metadata
from pathlib import Path


def has_dependencies(pyproject: Path, extra: str) -> bool:
    """Returns whether every requirement of the project (and of its optional `extra`) is met."""
    try:
        # Both come with the requirements themselves: without them these are not installed.
        from packaging.requirements import Requirement

        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
    except ImportError:
        return False
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + project["optional-dependencies"].get(extra, [])
    return all(_is_installed(Requirement(line)) for line in lines)


def _is_installed(requirement) -> bool:  # type: ignore[no-untyped-def]
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


if __name__ == "__main__":
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    sys.exit(not has_dependencies(pyproject, "".join(sys.argv[1:2])))
