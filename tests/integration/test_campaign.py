"""A sample of the campaign, and what it must catch."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.fuzz.apart import Outcome, run_apart
from tests.fuzz.disks import can_mount
from tests.fuzz.folders import SUBJECTS
from tests.support.paths import REPO


def campaign(*words: object) -> subprocess.CompletedProcess[str]:
    return python("-m", "tests.fuzz", *words)


def python(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_a_hang_a_crash_and_a_greedy_trial_fail():
    assert run_apart(lambda folder: time.sleep(60), seconds=0.5).said == "did not end within 0 s"
    assert "SIGKILL" in run_apart(lambda folder: os.kill(os.getpid(), signal.SIGKILL)).said
    assert "exit code 3" in run_apart(lambda folder: os._exit(3)).said
    assert "KeyError" in run_apart(lambda folder: {}["x"]).said
    greedy = run_apart(lambda folder: Outcome("read", str(len(b"x" * (5 * 2**29)))))
    assert greedy.kind == "failed" and "GiB of memory" in greedy.said
    assert run_apart(lambda folder: Outcome("read", "fine")) == Outcome("read", "fine")


def test_broken_configurations():
    done = campaign("--only", "toml", "--count", 25)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed" in done.stdout


@pytest.mark.slow
def test_damaged_folders():
    done = campaign("--only", f"^({'|'.join(SUBJECTS)})$", "--count", 3)
    assert done.returncode == 0, done.stdout + done.stderr


# A checkpoint gets its name before its files are written.
_NAMED_EARLY = """
import sys
from titan_moe.checkpoint import folder
begin = folder.begin
folder.begin = lambda target: begin(target).rename(target)
folder.commit = lambda aside, target: None
from tests.fuzz.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
def test_a_checkpoint_that_is_named_too_early_is_found():
    done = python("-c", _NAMED_EARLY, "--only", "kills", "--first", 36, "--count", 1)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "counts as a checkpoint" in done.stdout and "1 failed" in done.stdout


@pytest.mark.slow
def test_killed_runs():
    done = campaign("--only", "kills", "--count", 3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " resumed" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="mounting a file system takes root")
def test_disks_in_trouble():
    done = campaign("--only", "full|read_only|removed", "--count", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " resumed" in done.stdout
