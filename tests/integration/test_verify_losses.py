"""verify losses on real runs, as a user starts it."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import start_command
from tests.support.jobs import environment
from tests.support.paths import REPO
from tests.support.processes import start_process
from tests.support.tiers import split, tiered
from titan_moe.runtime.process_pool import TIMEOUT_S
from titan_moe.runtime.revision import code_revision
from titan_moe.verify.compare.goldens import golden_key

COMPARE = ["--config", REPO / "configs" / "debug" / "compare.toml"]
TINY = ["--model.name", "mixtral", "--training.steps", "3"]
GOLDENS = sorted(path for path in (REPO / "tests" / "goldens").iterdir() if path.is_dir())


def start(*words: object, out: Path, cwd: Path = REPO) -> subprocess.Popen[str]:
    words = ("verify", "losses", *words, "--out", out)
    return start_command(*words, cwd=cwd, start_new_session=True)


def compare(*words: object, out: Path, cwd: Path = REPO) -> tuple[int, str]:
    process = start(*words, out=out, cwd=cwd)
    told, _ = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, told


def compare_clone(folder: Path, *words: object, planted: tuple[str, str, str] | None) -> tuple:
    """Compares a clone, so that uncommitted changes here have no effect, with its last commit.

    Args:
        planted: a file, what stands in it once, and what stands there in the working tree.
    """
    clone = folder / "clone"
    subprocess.run(["git", "clone", "-q", REPO, clone], check=True)
    if planted is not None:
        file, right, wrong = planted
        text = (clone / file).read_text()
        assert text.count(right) == 1
        (clone / file).write_text(text.replace(right, wrong))
    sides = ["--baseline", "revision=HEAD ranks=1", "--candidate", "ranks=1"]
    return compare(*COMPARE, *sides, *words, out=folder / "out", cwd=clone)


RATE = ("titan_moe/optim/schedules.py", 'group["lr"] = ', 'group["lr"] = 1.5 * ')


@pytest.mark.skipif(code_revision(REPO) is None, reason="git has no commit of this folder")
@pytest.mark.parametrize(("planted", "code"), tiered([], slow=[(None, 0)], full=[(RATE, 1)]))
def test_my_change_against_the_last_commit(tmp_path: Path, planted, code: int):
    ended, told = compare_clone(tmp_path, *TINY, planted=planted)
    assert ended == code, told
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert found["baseline"]["told"].startswith("HEAD (")
    assert found["candidate"]["told"].startswith("working tree (")
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    assert not any((tmp_path / "out" / ".comparison_worktrees").iterdir())


@pytest.mark.slow
@pytest.mark.skipif(code_revision(REPO) is None, reason="git has no commit of this folder")
def test_a_candidate_that_holds_a_large_tensor_is_too_large(tmp_path: Path):
    right = "        self._metrics.reset()\n"
    wrong = f"{right}        self.held = torch.ones(2**28)\n"
    limit = ["--max-memory-growth", "0.5", "--training.steps", "10"]
    planted = ("titan_moe/training/train_step.py", right, wrong)
    ended, told = compare_clone(tmp_path, *TINY[:2], *limit, planted=planted)
    assert ended == 6, told
    assert "identical bits, but too large" in told and "GiB against" in told, told


@pytest.mark.slow
def test_an_interrupt_and_the_same_command_again(tmp_path: Path):
    sides = ["--baseline", "ranks=1", "--candidate", "ranks=1 --metrics.enable_tensorboard true"]
    process = start(*COMPARE, *sides, *TINY, out=tmp_path / "out")
    assert process.stdout is not None
    for line in process.stdout:
        if "candidate: ranks=1" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(60) == 130 and "the same command goes on" in rest
    code, told = compare(*COMPARE, *sides, *TINY, out=tmp_path / "out")
    assert code == 0 and "identical bits" in told, told


def file_of(golden: Path) -> Path:
    """This machine's; else another's, whose band allows for another order of summation too."""
    own = golden / f"{golden_key()}.json"
    return own if own.is_file() else min(golden.glob("torch-*.json"))


SHORTEST = [path for path in GOLDENS if path.name == "mixtral"]


@pytest.mark.parametrize("golden", split(GOLDENS, SHORTEST), ids=lambda path: path.name)
def test_the_models_train_as_their_goldens(golden: Path, tmp_path: Path):
    words = ["--baseline", str(file_of(golden)), "--candidate", "ranks=1"]
    code, told = compare(*words, out=tmp_path / "out")
    assert code in (0, 3), told


@pytest.mark.slow
def test_comparison_on_two_machines_ends_with_its_verdict_on_both(tmp_path: Path):
    """Two processes act as pods of a TrainJob, with one rank each."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    golden = file_of(REPO / "tests" / "goldens" / "mixtral")
    sides = ["--baseline", golden, "--candidate", "ranks=2 --optimizer.lr 3.06e-3"]
    words = [REPO / "scripts" / "regression.sh", "losses", *sides, "--out", tmp_path / "out"]
    env = {"PET_NNODES": 2, "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": port}
    envs = [environment(PET_NODE_RANK=node, **env) for node in range(2)]
    pods = [start_process(words, env=env, stdout=subprocess.PIPE, text=True) for env in envs]
    told = [pod.communicate(timeout=2 * TIMEOUT_S)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [1, 1], told
    assert "different" in told[0] and told[1].startswith("starting 1 rank(s)")
