"""Two clones of titan_moe and one environment, in which the other clone is installed."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.jobs import run_to_end
from tests.support.paths import REPO
from tests.support.processes import git

_CODE = ("titan_moe", "configs", "scripts", "run_train.sh", "pyproject.toml")


@dataclass
class Clones:
    """`installed` is what Python imports; `mine` is another clone of it."""

    installed: Path
    mine: Path

    def run(self, *words: object, at: Path, **variables: object) -> tuple[int, str]:
        """Run a program; returns its exit code, and both outputs as one."""
        done = run_to_end(*words, cwd=at, **{"PYTHONPATH": self.installed, **variables})
        return done.returncode, done.stdout + done.stderr

    def titan_moe(self, *words: object, at: Path, **variables: object) -> tuple[int, str]:
        """Run titan-moe as its console script does, which does not import from where it is run."""
        program = self.installed.with_name("titan-moe.py")
        program.write_text("from titan_moe.cli.main import entry\nentry()\n")
        return self.run(sys.executable, program, *words, at=at, **variables)


@pytest.fixture
def clones(tmp_path: Path) -> Clones:
    installed, mine = tmp_path / "installed", tmp_path / "mine"
    installed.mkdir()
    for name in _CODE:
        copy: Callable = shutil.copytree if (REPO / name).is_dir() else shutil.copy
        copy(REPO / name, installed / name)
    (installed / ".gitignore").write_text("__pycache__/\noutputs/\n")
    git(installed, "init")
    git(installed, "add", "-A")
    git(installed, "commit", "-m", "x")
    git(tmp_path, "clone", installed, mine)
    return Clones(installed, mine)


def test_command_in_another_checkout_is_refused(clones: Clones, tmp_path: Path) -> None:
    for folder in (clones.installed, tmp_path):
        exit_code, told = clones.titan_moe("--version", at=folder)
        assert exit_code == 0 and f" {clones.installed / 'titan_moe'} at " in told, told
    deep = clones.mine / "configs" / "debug"
    for folder, named in ((deep, {}), (tmp_path, {"TITAN_MOE_CHECKOUT": clones.mine})):
        exit_code, told = clones.titan_moe("--version", at=folder, **named)
        (line,) = told.splitlines()
        assert exit_code == 2 and str(clones.mine) in line and str(clones.installed) in line
    exit_code, told = clones.titan_moe("--version", at=deep, PYTHONPATH=clones.mine)
    assert exit_code == 0 and f" {clones.mine / 'titan_moe'} at " in told, told


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_run_train_checks_by_its_own_code(clones: Clones) -> None:
    """Called from the root of another checkout."""
    with (clones.mine / "titan_moe" / "prepare" / "job.py").open("a") as file:
        file.write("\n\ndef prepare(*_):\n    raise ConfigError(['this is mine'])\n")
    exit_code, told = clones.run(clones.mine / "run_train.sh", at=clones.installed)
    assert (exit_code, told) == (2, "error: this is mine\n")
