"""Bad input through run_train.sh: one clear line, the right exit code, nothing overwritten.

A case prepares its folder and returns what is wrong with the run; it may leave files there, which
must still be the same afterwards.
"""

import gzip
import hashlib
import resource
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import TITAN_MOE, run_command
from tests.support.launching import EMPTY, command, environment, run_train
from tests.support.tiers import split
from titan_moe.runtime.files import LOCK, lock_folder
from titan_moe.runtime.process_pool import TIMEOUT_S

_CONFIG, _RUN = 2, 1


@dataclass
class Bad:
    """One bad input and what must be said about it."""

    code: int
    words: list[str]
    overrides: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    max_file_bytes: int = resource.RLIM_INFINITY
    changes: set[str] = field(default_factory=set)
    """Files that a run which starts well writes before it fails."""
    held: Any = None
    """Kept alive until the run has ended."""


Case = Callable[[Path], Bad]


# Overrides, ranks, and words of the one line.
_WRONG: dict[str, tuple[dict[str, Any], int, list[str]]] = {
    "unknown key": ({"training__stepz": 3}, 1, ["training.stepz", "did you mean training.steps?"]),
    "wrong type": ({"training__steps": "many"}, 1, ['training.steps = "many"', "valid integer"]),
    "flavor": ({"model__flavor": "debugmodle"}, 1, ["did you mean 'debugmodel'?"]),
    "ranks": (
        {"parallelism__data_parallel_shard_degree": 8},
        2,
        ["dp_shard 8 = 8 ranks, but this"],
    ),
    "batch of a stage": (
        {"stages": '[{"from_step": 2, "global_batch_size": 5}]', "training__steps": 4},
        1,
        ["stages[0] (from_step=2): training.global_batch_size=5 must be a multiple of"],
    ),
}


def wrong_configuration(name: str) -> Case:
    overrides, ranks, words = _WRONG[name]
    return lambda folder: Bad(_CONFIG, words, overrides, {"NGPU": ranks})


def no_number_of_ranks(folder: Path) -> Bad:
    return Bad(_CONFIG, ["NGPU=all", "whole number"], variables={"NGPU": "all"})


def missing_config_file(folder: Path) -> Bad:
    return Bad(_CONFIG, ["nowhere.toml", "No such file"], variables={"CONFIG_FILE": "nowhere.toml"})


def _data(path: Path, *words: str) -> Bad:
    overrides = {"training__dataset": "text", "training__dataset_path": path}
    return Bad(_CONFIG, [str(path), *words], overrides)


def missing_data(folder: Path) -> Bad:
    return _data(folder / "nowhere.txt")


def empty_data(folder: Path) -> Bad:
    (folder / "data.txt").touch()
    return _data(folder / "data.txt")


def unreadable_data(folder: Path) -> Bad:
    path = folder / "data.txt.gz"
    path.write_bytes(gzip.compress(b"some text to read\n" * 10_000)[:100])
    return _data(path, "cannot be read")


def data_smaller_than_one_batch(folder: Path) -> Bad:
    (folder / "data.txt").write_text("a few words\n")
    words = ["1 documents", "2 sequences", "training.repeat_dataset=true"]
    return replace(_data(folder / "data.txt"), words=words)


def tokenizer_larger_than_vocabulary(folder: Path) -> Bad:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocabulary = {f"word{n}": n for n in range(100_000)} | {"<eos>": 100_000}
    Tokenizer(WordLevel(vocabulary, unk_token="word0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    words = ["model.tokenizer_path", "100001", "vocab_size"]
    return Bad(_CONFIG, words, {"model__tokenizer_path": folder})


def folder_of_another_model(folder: Path) -> Bad:
    _make_checkpoint(folder, model__flavor="debugmodel")
    words = ["model.flavor='2M'", "step-1 is of a run with 'debugmodel'", "job.dump_folder"]
    return Bad(_CONFIG, words, {"checkpoint__enable": True})


def folder_in_use(folder: Path) -> Bad:
    # Of this process, which lives.
    lock_folder(folder, "job.dump_folder")
    return Bad(_RUN, [f"{folder} is in use by process", "job.dump_folder"])


def full_disk(folder: Path) -> Bad:
    # A mount needs root: a limit on file sizes fails the same writes.
    _make_checkpoint(folder)
    words = ["cannot save checkpoint", "step-2"]
    bad = Bad(_RUN, words, {"checkpoint__enable": True}, max_file_bytes=2**18)
    return replace(bad, changes={"config.toml", "metrics.jsonl"})


def unwritable_folder(folder: Path) -> Bad:
    (folder / "file").touch()
    overrides = {"job__dump_folder": folder / "file" / "outputs"}
    return Bad(_RUN, ["job.dump_folder", "Not a directory"], overrides)


def port_in_use(folder: Path) -> Bad:
    server = socket.create_server(("", 0))
    endpoint = f"localhost:{server.getsockname()[1]}"
    variables = {"NNODES": 2, "NODE_RANK": 0, "RDZV_ENDPOINT": endpoint}
    return Bad(_RUN, [endpoint, "in use"], variables=variables, held=server)


UNKNOWN, RANKS = wrong_configuration("unknown key"), wrong_configuration("ranks")
# What only a launcher or a run can notice.
RUNS: list[Case] = [
    unreadable_data,
    data_smaller_than_one_batch,
    no_number_of_ranks,
    missing_config_file,
    folder_of_another_model,
    folder_in_use,
    full_disk,
    unwritable_folder,
    port_in_use,
]
LAUNCHED = [UNKNOWN, RANKS, missing_data, unwritable_folder]


@pytest.mark.parametrize(
    "case",
    [*map(wrong_configuration, _WRONG), missing_data, empty_data, tokenizer_larger_than_vocabulary],
)
def test_bad_configuration_is_one_line(tmp_path: Path, case: Case) -> None:
    """Runs the check of run_train.sh before any rank starts, in this process."""
    bad = case(tmp_path)
    before = _digests(tmp_path, without=set())
    _, *arguments = command(tmp_path, **bad.overrides)
    ranks = bad.variables.get("NGPU", 1)
    ended = run_command("check", "--config", EMPTY, "--ranks", ranks, *arguments)
    _assert_one_line(bad, ended)
    assert before == _digests(tmp_path, without=set())


@pytest.mark.parametrize("case", split([UNKNOWN, RANKS, missing_data, *RUNS], LAUNCHED))
def test_bad_input_is_one_line(tmp_path: Path, case: Case) -> None:
    bad = case(tmp_path)
    before = _digests(tmp_path, without=bad.changes)
    ended = subprocess.run(
        command(tmp_path, **bad.overrides),
        env=environment(**bad.variables),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (bad.max_file_bytes,) * 2),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    _assert_one_line(bad, ended)
    assert before.items() <= _digests(tmp_path, without=bad.changes).items()


@pytest.mark.slow
@pytest.mark.parametrize("case", [folder_in_use, folder_of_another_model])
def test_ranks_without_a_launcher_check_the_folder(tmp_path: Path, case: Case) -> None:
    bad = case(tmp_path)
    _, *arguments = command(tmp_path, **bad.overrides)
    ended = subprocess.run(
        [*TITAN_MOE, "train", "--one-process", "--config", EMPTY, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    ended.stderr = "".join(ended.stderr.splitlines(keepends=True)[-1:])  # torch may warn before.
    _assert_one_line(bad, ended)


def _assert_one_line(bad: Bad, ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith("error: ")
    for word in bad.words:
        assert word in ended.stderr
    assert ended.returncode == bad.code


def _make_checkpoint(folder: Path, **overrides: Any) -> None:
    """A finished run of one step in `folder`."""
    made = run_train(folder, training__steps=1, checkpoint__enable=True, **overrides)
    assert made.returncode == 0, made.stderr


def _digests(folder: Path, without: set[str]) -> dict[Path, str]:
    without = {*without, LOCK}  # Each run writes its name there.
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in without]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
