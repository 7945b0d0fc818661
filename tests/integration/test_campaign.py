"""A sample of the campaign, and what it must catch."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.disturbances import can_mount
from tests.fuzz.folders import SUBJECTS
from tests.support.jobs import run_to_end
from tests.support.paths import REPO


def campaign(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", "tests.fuzz", *words)
    return run_to_end(*words, cwd=REPO, seconds=900, **variables)


@pytest.mark.slow
def test_damaged_folders():
    done = campaign("--only", f"^({'|'.join(SUBJECTS)})$", "--count", 1)
    assert done.returncode == 0, done.stdout + done.stderr


# A checkpoint gets its name before its files are written.
_NAMED_EARLY = """
from titan_moe.checkpoint import folder
begin = folder.begin
folder.begin = lambda target: begin(target).rename(target)
folder.commit = lambda aside, target: None
"""


@pytest.mark.slow
def test_checkpoint_that_is_named_too_early_is_found(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(_NAMED_EARLY)
    options = ("--only", "kills", "--first", 725, "--count", 1)
    done = campaign(*options, PYTHONPATH=f"{REPO}:{tmp_path}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "counts as a checkpoint" in done.stdout and "1 failed" in done.stdout


_MOUNTS = pytest.mark.skipif(not can_mount(), reason="mounting a file system takes root")


@pytest.mark.slow
@pytest.mark.parametrize(
    "subject, count", [("kills", 2), pytest.param("full|read_only|removed", 1, marks=_MOUNTS)]
)
def test_killed_runs_and_disks_in_trouble(subject: str, count: int):
    done = campaign("--only", subject, "--count", count)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " resumed" in done.stdout
