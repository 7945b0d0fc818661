"""A simulation that compared nothing has no verdict."""

import pytest

from titan_moe.cli.main import main
from titan_moe.simulate import collectives


def test_ranks_that_come_through_no_trial_are_not_said_to_agree(
    monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(collectives, "_warm_up", lambda task: None)
    monkeypatch.setattr(collectives, "run_ranks", lambda *_: (None for _ in range(0)))
    monkeypatch.setattr(
        collectives, "in_fresh_processes", lambda run, calls, num_workers: [(0, run(*calls[0]))]
    )
    words = ["--config", "configs/debug/compare.toml", "--ranks", "2"]
    assert main(["simulate", "collectives", *words]) == 4
    said = capsys.readouterr()
    assert "nothing was compared of start, " in said.err and "agree" not in said.out
