"""The Dockerfile passes its linter and copies what exists."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPO

_HADOLINT = Path(sys.executable).parent / "hadolint"


@pytest.mark.skipif(not _HADOLINT.is_file(), reason="hadolint has a wheel for x86-64 alone")
def test_dockerfile_passes_its_linter() -> None:
    subprocess.run([_HADOLINT, "--no-color", REPO / "Dockerfile"], check=True, timeout=60)


def test_image_gets_files_that_exist() -> None:
    kept = [
        line[1:] for line in (REPO / ".dockerignore").read_text().splitlines() if line[0] == "!"
    ]
    assert [name for name in kept if not (REPO / name).exists()] == []
    assert {"run_train.sh", "titan_moe", "pyproject.toml"} <= set(kept)
