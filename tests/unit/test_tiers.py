"""How long a test of the default tier may take, and which slice of the full tier has a test."""

import subprocess
import sys
from pathlib import Path

from tests.support.paths import REPO
from tests.support.tiers import in_slice


def test_slow_test_of_the_default_tier_fails_unless_it_is_of_the_folder_gpu(tmp_path: Path) -> None:
    files = [tmp_path / "unit" / "test_a.py", tmp_path / "gpu" / "test_b.py"]
    for file in files:
        file.parent.mkdir()
        file.write_text("def test_that_takes_a_while(): sum(range(1_000_000))")
    options = ["-p", "tests.conftest", "-o", "fail_after_s=0.001", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}", *map(str, files)]
    run = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert "1 failed, 1 passed" in run.stdout, run.stdout
    assert "unit/test_a.py" in run.stdout and "limit 0.001 s" in run.stdout


def test_consecutive_slices_have_each_test_once() -> None:
    names = [f"test_a[{case}]" for case in range(100, 999)]
    chosen = [name for number in range(7, 47) for name in names if in_slice(number, name, 40)]
    assert sorted(chosen) == names != chosen
