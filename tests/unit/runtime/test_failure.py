"""The first failing rank's own line, found in records and on torchrun's page."""

import errno
from pathlib import Path

import pytest
import torch

from titan_moe import train
from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.failure import Failure, explain, report

_PAGE = """
titan_moe FAILED
Failures:
[1]:
  time      : 2026-01-01_00:00:00
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {first} (pid: 11)
  traceback : Signal received by PID 11
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : {root} (pid: 10)
"""


def _explain(folder: Path, page: str = "", *failures: Failure) -> tuple[list[str], int]:
    attempt = folder / "attempt-0"
    attempt.mkdir()
    for failure in failures:
        failure.save(attempt)
    log = folder / "torchrun.log"
    log.write_text(page)
    return explain(folder, log, "node0:29500")


def test_the_earliest_mistake_speaks(tmp_path: Path) -> None:
    lines, code = _explain(
        tmp_path,
        _PAGE.format(first=2, root=1),
        Failure(3.0, 0, 1, ["late"], expected=True),
        Failure(2.0, 1, 2, ["first", "and second"], expected=True),
        Failure(1.0, 2, 1, ["peer lost"], expected=False),
    )
    assert (lines, code) == (["first", "and second"], 2)


def test_what_an_earlier_attempt_failed_of_is_not_the_cause(tmp_path: Path) -> None:
    (tmp_path / "attempt-10").mkdir()
    page = _PAGE.format(first=-15, root=-9)
    lines, code = _explain(tmp_path, page, Failure(1.0, 0, 2, ["mended"], expected=True))
    assert code == 137 and lines[0].startswith("rank 0 was killed by SIGKILL")


def test_a_file_that_was_cut_short_is_guessed(tmp_path: Path) -> None:
    lines, code = _explain(tmp_path, _PAGE.format(first=-15, root=-7))
    assert code == 135 and "SIGBUS (often: a file was cut short while it was read)" in lines[0]


def test_a_killed_rank_speaks_before_the_peers_that_lost_it(tmp_path: Path) -> None:
    lines, code = _explain(
        tmp_path,
        _PAGE.format(first=-9, root=1),
        Failure(1.0, 0, 1, ["rank 0: RuntimeError: connection closed by peer"], expected=False),
    )
    assert code == 137
    assert lines[0].startswith("rank 1 was killed by SIGKILL (often: out of memory)")


def test_ranks_that_torchrun_ended_are_not_the_cause(tmp_path: Path) -> None:
    lines, code = _explain(tmp_path, _PAGE.format(first=-15, root=-11))
    assert code == 139 and lines[0].startswith("rank 0 was killed by SIGSEGV;")


def test_an_unforeseen_exception_names_the_file_with_its_traceback(tmp_path: Path) -> None:
    failure = Failure(1.0, 0, 1, ["rank 0: ValueError: boom"], expected=False)
    lines, code = _explain(tmp_path, _PAGE.format(first=-15, root=1), failure)
    assert code == 1
    assert lines == [f"rank 0: ValueError: boom (traceback in {tmp_path / 'torchrun.log'})"]


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("DistNetworkError: ... port: 29500 EADDRINUSE", "port of RDZV_ENDPOINT=node0:29500"),
        ("RendezvousConnectionError: failed", "could not meet at RDZV_ENDPOINT=node0:29500"),
        ("", "without naming a rank"),
        (_PAGE.format(first=-15, root=3), "rank 0 ended with exit code 3"),
    ],
)
def test_without_a_record_torchruns_page_is_read(tmp_path: Path, page: str, words: str) -> None:
    (line,), code = _explain(tmp_path, page)
    assert words in line and code == (3 if "exitcode" in page else 1)


def test_a_record_that_cannot_be_written_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(0, ["no\nroom"], 1, expected=True, to=tmp_path / "missing")
    assert capsys.readouterr().err == "error: no room\n"
    report(0, ["no room"], 1, expected=True, to=tmp_path)
    assert capsys.readouterr().err == "" and (tmp_path / "rank-0.json").exists()


def test_a_file_of_another_user_is_one_line() -> None:
    error = PermissionError(errno.EACCES, "Permission denied", "out/metrics.jsonl")
    lines, code, expected = train._explain(error, 0)
    assert expected and code == 1
    assert lines == [
        "cannot read or write out/metrics.jsonl: Permission denied; let this user read and write "
        "there and start the same command again"
    ]


_ASSERT = "CUDA error: device-side assert triggered"
_ECC = "CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ConfigError(["training.steps=0: choose 1"]), 2, "training.steps=0: choose 1"),
        (RunError("cannot load x"), 1, "cannot load x"),
        (ValueError("too many values to unpack"), 70, "ValueError: too many"),
        (RuntimeError(_ASSERT), 70, _ASSERT),
        (RuntimeError(_ECC), 1, _ECC),
        (MemoryError(), 1, "MemoryError"),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            1,
            "(docs/troubleshooting.md#out-of-memory-on-the-gpu)",
        ),
        (RuntimeError("[gloo] Connection closed by peer"), 1, "[gloo] Connection closed"),
    ],
)
def test_exit_code_and_traceback_by_kind_of_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    says: str,
) -> None:
    def run(*_: object) -> bool:
        raise error

    monkeypatch.setattr(train, "_run", run)
    assert train.main([], {}) == code
    printed = capsys.readouterr().err
    assert says in printed.splitlines()[-1]
    assert ("Traceback" in printed) == (not isinstance(error, (ConfigError, RunError)))
