"""Each promise of tests/broken_promises has a test that fails when its line is wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.broken_promises import Broken, read_promises
from tests.support.paths import copy_checkout

PROMISES = read_promises()
# A test's limit is below the time that ranks wait for one another, so that it is known as a limit.
_LIMITS_S = {"test": 240, "run": 900}
_VARIABLES = ("PYTEST_", "TITAN_MOE_", "PYTHON")
"""Prefixes of variables that would tell a test of the copy about this run."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git knows, as they are now."""
    root = tmp_path_factory.mktemp("tree")
    copy_checkout(root)
    return root


def run_tests(tree: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs tests up to the first that fails."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith(_VARIABLES)}
    options = ["-x", "-p", "no:cacheprovider", "-rf", f"--timeout={_LIMITS_S['test']}"]
    return subprocess.run(
        [sys.executable, "-B", "-m", "pytest", *options, "--tier", "default", *arguments],
        cwd=tree,
        env=kept | {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMITS_S["run"],
    )


@pytest.mark.full
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("broken", PROMISES, ids=[each.name for each in PROMISES])
def test_a_broken_promise_is_seen(tree: Path, broken: Broken) -> None:
    path, text = tree / broken.file, broken.break_file(tree)
    right = path.read_bytes()
    path.write_text(text, encoding="utf-8")
    try:
        done = run_tests(tree, broken.test_arguments())
    finally:
        path.write_bytes(right)
    failed = re.findall(r"^FAILED (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED and failed, done.stdout[-4000:]
    assert broken.waits or "Timeout (>" not in done.stdout, done.stdout[-4000:]
    again = run_tests(tree, [failed[0], "--tier", "full"])
    assert again.returncode == 0, f"{failed[0]} fails without the mistake too"
