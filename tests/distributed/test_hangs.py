"""Planted hangs are diagnosed: which call waits, who is there, and where the others are."""

from pathlib import Path

import pytest

from tests.support.hanging import hang, train_watched
from tests.support.tiers import tiered
from titan_moe.runtime.ranks import run_on_ranks

_WAITS = "rank 0 waits in the step (all_gather, all ranks, 1 of 2 there); rank 1 "
_DIFFERS = "step 3: ranks went different ways: rank 0 called all_reduce"


@pytest.mark.parametrize(
    ("plant", "says"),
    tiered(
        [("loader", _WAITS + "is in the loader (titan_moe/data/loader.py:")],
        slow=[
            ("stopped", _WAITS + "does not answer (stopped, killed, or Python is held)"),
            (
                "other branch",
                _DIFFERS + " of 29 Double in the gradient norm of step 3 where rank 1 called "
                "all_gather of 64 Float in the step of step 4",
            ),
        ],
    ),
)
def test_hang_report_names_waiting_ranks(tmp_path: Path, plant: str, says: str) -> None:
    lines = hang(tmp_path, plant)
    assert says in lines[0], lines


@pytest.mark.slow
def test_save_past_its_limit_names_the_key(tmp_path: Path) -> None:
    lines = hang(tmp_path, "writer")
    assert "rank 1 is saving a checkpoint (titan_moe/checkpoint/checkpointer.py:" in lines[0]
    assert lines[-1] == "if the disk is only slow, raise checkpoint.save_timeout_seconds"


@pytest.mark.slow
def test_save_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    run_on_ranks(train_watched, 2, tmp_path, "slow writer")
    assert (tmp_path / "checkpoint" / "step-6" / "manifest.json").is_file()
    assert not (tmp_path / "comm_traces").exists()


@pytest.mark.slow
def test_hang_report_names_groups_and_layers(tmp_path: Path) -> None:
    # The call that has waited longest comes first: which one that is, is a matter of chance.
    lines = hang(tmp_path, "in a layer", world_size=4)
    others, first = sorted(lines, key=lambda line: "combine" in line)
    assert "ranks 2-3 wait in layer 3 (all_gather, all ranks, 2 of 4 there); rank 1 " in others
    assert others.endswith("; rank 0 waits elsewhere")
    assert "rank 0 waits in layer 2's combine (all_to_all, ep group 0-1, 1 of 2" in first
    assert "; rank 1 is in layer 2's experts (titan_moe/moe/layer.py:" in first
