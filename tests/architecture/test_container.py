"""The Dockerfile passes its linter and copies what exists; the workflow runs the default tier."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.paths import REPO

_HADOLINT = Path(sys.executable).parent / "hadolint"


def lint(dockerfile: Path) -> subprocess.CompletedProcess[str]:
    if not _HADOLINT.is_file():
        pytest.skip("hadolint has a wheel for Linux on x86-64 alone")
    return subprocess.run(
        [_HADOLINT, "--no-color", dockerfile], capture_output=True, text=True, timeout=60
    )


def test_the_dockerfile_passes_its_linter() -> None:
    done = lint(REPO / "Dockerfile")
    assert done.returncode == 0, done.stdout


def test_the_image_gets_files_that_exist() -> None:
    kept = [
        line[1:] for line in (REPO / ".dockerignore").read_text().splitlines() if line[0] == "!"
    ]
    assert [name for name in kept if not (REPO / name).exists()] == []
    assert {"run_train.sh", "titan_moe", "pyproject.toml"} <= set(kept)


def test_the_workflow_runs_the_default_tier_on_the_oldest_python() -> None:
    workflow = yaml.safe_load((REPO / ".github" / "workflows" / "test.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1]["run"] == "./scripts/test.sh"
    assert 'requires-python = ">=3.10"' in (REPO / "pyproject.toml").read_text()
    assert job["strategy"]["matrix"]["python"][0] == "3.10"
