"""A first run shows its progress and commands that work, also from an installed package."""

import re
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support.commands import TITAN_MOE
from tests.support.jobs import run_to_end
from tests.support.paths import REPO, copy_checkout


def _commands(text: str) -> list[str]:
    """Returns the commands below the line "next you can ..."."""
    _, found, below = text.partition("next you can ")
    assert found, text
    return re.findall(r"^  (.+)$", below, re.MULTILINE)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with titan_moe as `pip install .` puts it there, and nothing else."""
    pytest.importorskip("setuptools", "77")
    folder = tmp_path_factory.mktemp("wheel")
    copy_checkout(folder / "source")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    words = [*pip, "--no-index", "--target", str(folder / "site"), str(folder / "source")]
    done = run_to_end(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.mark.slow
def test_an_installed_package_trains_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    run = partial(run_to_end, cwd=tmp_path, PYTHONPATH=installed, TITAN_MOE_CHECKOUT="")

    def titan_moe(*words: str) -> str:
        done = run(*TITAN_MOE, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert str(installed / "titan_moe") in titan_moe("--version")
    titan_moe("config", "schema", "--out", "schema.json")
    assert (tmp_path / "schema.json").read_text() == (REPO / "configs/schema.json").read_text()
    assert "nothing is wrong" in titan_moe("check", "--config", "qwen3/debugmodel_moe")
    keys = ["--training.steps=2", "--training.seq_len=64", "--checkpoint.enable=true"]
    told = titan_moe("train", "--config", "default", "--ranks", "2", "--validation.steps=2", *keys)
    generate, page = _commands(told)
    assert "generate outputs/default/checkpoint/step-2" in generate
    assert run("bash", "-c", page).returncode == 0
    assert (tmp_path / "outputs" / "default" / "report.html").is_file()
