"""A rank asks all to stop at its launcher's request."""

import argparse
import sys
from pathlib import Path

import pytest

from titan_moe.cli.train import COMMAND
from titan_moe.runtime.launch import Launch
from titan_moe.runtime.stopping import StopRequest, all_attempts, has_stopped, request_stop


def test_first_rank_of_a_node_reads_the_request_and_answers(tmp_path: Path) -> None:
    environment = {"TITAN_MOE_ATTEMPTS": str(tmp_path), "TORCHELASTIC_RESTART_COUNT": "2"}
    launches = (Launch(rank=4 + rank, local_rank=rank) for rank in range(2))
    first, second = (StopRequest(launch, environment) for launch in launches)
    assert not first.asks() and not second.asks()
    request_stop(tmp_path)
    assert first.asks() and not second.asks()
    second.answer()
    assert not has_stopped(tmp_path)
    first.answer()
    assert has_stopped(tmp_path)
    StopRequest(Launch(), environment | {"TORCHELASTIC_RESTART_COUNT": "10"})
    assert not has_stopped(tmp_path), "the next attempt has not"
    alone = StopRequest(Launch(), {})
    assert not alone.asks()
    alone.answer()


def test_attempt_that_dies_in_its_imports_still_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, its failure would be reported in the words of the attempt before."""
    (tmp_path / "attempt-0").mkdir()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("TITAN_MOE_ATTEMPTS", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr("titan_moe.runtime.launch.end_with_parent", lambda: None)
    monkeypatch.setitem(sys.modules, "titan_moe.train", None)
    with pytest.raises(ImportError):
        COMMAND.run(argparse.Namespace(dry_run=None))
    assert all_attempts(tmp_path)[-1].name == "attempt-1"
