"""Exit codes and lines of errors on a rank."""

import errno
from pathlib import Path

import pytest
import torch

from titan_moe import train
from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError, print_errors, report, with_remedy


def test_report_prints_a_record_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(0, ["no\nroom"], 1, expected=True, to=tmp_path / "missing")
    assert capsys.readouterr().err == "error: no room\n"
    report(0, ["no room"], 1, expected=True, to=tmp_path)
    assert capsys.readouterr().err == "" and (tmp_path / "rank-0.json").exists()


@pytest.mark.parametrize("text", ["No space left on device", "Disk quota exceeded"])
def test_full_disk_error_names_the_folder_and_remedies(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = with_remedy(f"[Errno 28] {text}", Path("/cache"))
    assert "(in /cache); free some space, or move files by job.dump_folder, " in line
    assert "HF_HOME, HF_DATASETS_CACHE" in line and with_remedy(line) == line
    print_errors([f"cannot write x: {text}", line, "Permission denied"])
    first, second, third = capsys.readouterr().err.splitlines()
    assert "; free some space, or move files by" in first and second == f"error: {line}"
    assert third == "error: Permission denied"


_DENIED = PermissionError(errno.EACCES, "Permission denied", "out/metrics.jsonl")
_ASSERT = "CUDA error: device-side assert triggered"
_ECC = "CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ConfigError(["training.steps=0: choose 1"]), 2, "error: training.steps=0: choose 1"),
        (RunError("cannot load x"), 1, "error: cannot load x"),
        (_DENIED, 1, "error: cannot read or write out/metrics.jsonl: Permission denied; let this"),
        (ValueError("too many values to unpack"), 70, "ValueError: too many"),
        (RuntimeError(_ASSERT), 70, _ASSERT),
        (RuntimeError(_ECC), 1, _ECC),
        (MemoryError(), 1, "MemoryError"),
        (torch.OutOfMemoryError("CUDA out of memory"), 1, "#out-of-memory-on-the-gpu)"),
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
    assert ("Traceback" in printed) == (not isinstance(error, (ConfigError, RunError, OSError)))
