"""Bad input through run_train.sh: one clear line, the right exit code, nothing overwritten.

A case prepares its folder and returns what is wrong with the run; it may leave files there, which
must still be the same afterwards.
"""

import hashlib
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import TITAN_MOE, run_command
from tests.support.documents import write_ranks
from tests.support.jobs import EMPTY, command, run_to_end
from tests.support.tiers import tiered
from titan_moe.runtime.files import LOCK, lock_folder

_CONFIG, _RUN = 2, 1


@dataclass
class Bad:
    """One bad input and what must be said about it."""

    code: int
    words: list[str]
    overrides: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    held: Any = None
    """Kept alive until the run has ended."""


Case = Callable[[Path], Bad]


def misspelt_flavor(folder: Path) -> Bad:
    return Bad(_CONFIG, ["did you mean 'debugmodel'?"], {"model__flavor": "debugmodle"})


def no_number_of_ranks(folder: Path) -> Bad:
    return Bad(_CONFIG, ["NGPU=all", "whole number"], variables={"NGPU": "all"})


def missing_data(folder: Path) -> Bad:
    path = folder / "nowhere.txt"
    overrides = {"training__dataset": "text", "training__dataset_path": path}
    return Bad(_CONFIG, [str(path)], overrides)


def tokenizer_larger_than_vocabulary(folder: Path) -> Bad:
    words, path = ["model.tokenizer_path", "512", "=272"], write_ranks(folder / "tokenizer.model")
    return Bad(_CONFIG, words, {"model__tokenizer_path": path})


def folder_of_another_model(folder: Path) -> Bad:
    keys = {"model__flavor": "debugmodel", "training__steps": 1, "checkpoint__enable": True}
    made = _run(_in_one_process(folder, keys), Bad(0, []))
    assert made.returncode == 0, made.stderr
    words = ['model.flavor="2M"', 'step-1 is of a run with "debugmodel"', "job.dump_folder"]
    return Bad(_CONFIG, words, {"checkpoint__enable": True})


def folder_in_use(folder: Path) -> Bad:
    # The number of this process, which is alive.
    lock_folder(folder, "job.dump_folder")
    return Bad(_RUN, [f"{folder} is in use by process", "job.dump_folder"])


def unwritable_folder(folder: Path) -> Bad:
    (folder / "file").touch()
    overrides = {"job__dump_folder": folder / "file" / "outputs"}
    return Bad(_RUN, ["job.dump_folder", "Not a directory"], overrides)


def port_in_use(folder: Path) -> Bad:
    server = socket.create_server(("", 0))
    endpoint = f"localhost:{server.getsockname()[1]}"
    variables = {"NNODES": 2, "NODE_RANK": 0, "RDZV_ENDPOINT": endpoint}
    return Bad(_RUN, [endpoint, "in use"], variables=variables, held=server)


@pytest.mark.parametrize("case", [misspelt_flavor, tokenizer_larger_than_vocabulary])
def test_bad_configuration_is_one_line(tmp_path: Path, case: Case) -> None:
    """Runs the check of run_train.sh before any rank starts, in this process."""
    bad = case(tmp_path)
    _, *arguments = command(tmp_path, **bad.overrides)
    _assert_one_line(bad, run_command("check", "--config", EMPTY, "--ranks", 1, *arguments))


@pytest.mark.parametrize(
    "case",
    tiered(
        [missing_data, unwritable_folder],
        slow=[no_number_of_ranks, folder_in_use, port_in_use],
    ),
)
def test_bad_input_is_one_line(tmp_path: Path, case: Case) -> None:
    bad = case(tmp_path)
    before = _digests(tmp_path)
    _assert_one_line(bad, _run(command(tmp_path, **bad.overrides), bad))
    assert before.items() <= _digests(tmp_path).items()


@pytest.mark.slow
@pytest.mark.parametrize("case", [folder_in_use, folder_of_another_model])
def test_ranks_without_a_launcher_check_the_folder(tmp_path: Path, case: Case) -> None:
    bad = case(tmp_path)
    ended = _run(_in_one_process(tmp_path, bad.overrides), bad)
    ended.stderr = "".join(ended.stderr.splitlines(keepends=True)[-1:])  # torch may warn before.
    _assert_one_line(bad, ended)


def _in_one_process(folder: Path, overrides: dict[str, Any]) -> list[str]:
    _, *arguments = command(folder, **overrides)
    return [*TITAN_MOE, "train", "--one-process", "--config", str(EMPTY), *arguments]


def _run(words: list[str], bad: Bad) -> subprocess.CompletedProcess[str]:
    return run_to_end(*words, **bad.variables)


def _assert_one_line(bad: Bad, ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith("error: ")
    for word in bad.words:
        assert word in ended.stderr
    assert ended.returncode == bad.code


def _digests(folder: Path) -> dict[Path, str]:
    # Each run writes its name into the lock.
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
