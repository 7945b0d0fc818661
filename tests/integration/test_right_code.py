"""Two clones of titan_moe and one environment, in which the other clone is installed."""

import os
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import REPO

_CODE = ("titan_moe", "configs", "scripts", "run_train.sh", "pyproject.toml")


@dataclass
class Clones:
    """`installed` is what the environment's Python imports; `mine` is another clone of it."""

    installed: Path
    mine: Path
    programs: Path

    def run(self, *words: object, at: Path, **variables: object) -> tuple[int, str]:
        """A program of the environment: its exit code, and both outputs as one."""
        program, *arguments = map(str, words)
        mine = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        mine |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [self.programs / program, *arguments],
            cwd=at,
            env=mine | {key: str(value) for key, value in variables.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
        )
        return done.returncode, done.stdout


@pytest.fixture
def clones(tmp_path: Path) -> Clones:
    installed, mine = tmp_path / "installed", tmp_path / "mine"
    installed.mkdir()
    for name in _CODE:
        copy: Callable = shutil.copytree if (REPO / name).is_dir() else shutil.copy
        copy(REPO / name, installed / name)
    (installed / ".gitignore").write_text("__pycache__/\noutputs/\n")
    _git("init", "-q", at=installed)
    _git("add", "-A", at=installed)
    _git("commit", "-qm", "x", at=installed)
    _git("clone", "-q", str(installed), str(mine), at=tmp_path)
    return Clones(installed, mine, _environment(tmp_path / "environment", installed))


def _git(*words: str, at: Path) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run(["git", *identity, *words], cwd=at, check=True)


def _environment(folder: Path, installed: Path) -> Path:
    """An environment with this one's packages, and with a clone as `pip install -e` puts it."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text("\n".join([*site.getsitepackages(), str(installed)]))
    programs = {
        "titan-moe": "from titan_moe.cli.main import entry\nentry()\n",
        "torchrun": "from torch.distributed.run import main\nmain()\n",
    }
    for name, text in programs.items():
        path = folder / "bin" / name
        path.write_text(f"#!{folder / 'bin' / 'python'}\n{text}")
        path.chmod(0o755)
    return folder / "bin"


def test_a_command_is_of_the_checkout_that_it_is_called_in(clones: Clones, tmp_path: Path) -> None:
    deep = clones.mine / "configs" / "debug"
    where = "import titan_moe.config.errors as errors; print(errors.__file__)"
    _, imported = clones.run("python", "-c", where, at=deep)
    assert imported.startswith(str(clones.installed)), "Python itself takes the other clone"
    for folder, code in (
        (deep, clones.mine),
        (clones.mine, clones.mine),
        (clones.installed, clones.installed),
        (tmp_path, clones.installed),
    ):
        exit_code, told = clones.run("titan-moe", "--version", at=folder)
        assert exit_code == 0 and told.startswith(f"titan_moe {code / 'titan_moe'} at "), told


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_run_train_checks_by_its_own_code(clones: Clones) -> None:
    """Called from the root of another checkout."""
    with (clones.mine / "titan_moe" / "train.py").open("a") as file:
        file.write("\n\ndef prepare_job(*_):\n    raise ConfigError(['this is mine'])\n")
    script = os.path.relpath(clones.mine / "run_train.sh", clones.programs)
    path = f"{clones.programs}:{os.environ['PATH']}"
    exit_code, told = clones.run(script, at=clones.installed, PATH=path, NGPU=1)
    assert (exit_code, told) == (2, "error: this is mine\n")
