"""When a rank takes a run for one that hangs."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from titan_moe.config.job_config import Comm
from titan_moe.debug import hang
from titan_moe.runtime.process import BACKEND_GRACE_S

_LIMIT_S = 100
_SAVE_S = 2000
_LONGEST_S = _SAVE_S + BACKEND_GRACE_S


@pytest.mark.parametrize(
    ("quiet_s", "phase", "collectives", "hangs"),
    [
        (_LIMIT_S / 2, "step", [(_LIMIT_S, _LIMIT_S)], False),
        (_LIMIT_S + 1, "step", [(_LIMIT_S, _LIMIT_S)], True),
        (_LIMIT_S + 1, "step", [(_LIMIT_S, 2 * _LIMIT_S)], False),
        (_LIMIT_S + 1, "data", [], False),
        (_LONGEST_S - 1, "checkpoint", [], False),
        (_LONGEST_S + 1, "checkpoint", [], True),
        (_LONGEST_S + 1, "data", [], True),
        (_LONGEST_S + 1, "start", [], False),
        (_LIMIT_S + 500, "step", [], False),  # A step may compile for minutes.
    ],
)
def test_hang_watch_waits_too_long(
    quiet_s: float,
    phase: str,
    collectives: list[tuple[float, float]],
    hangs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collective past its own limit; or a rank that is silent longer than a save may take, except
    in a start, which compiles and reads as long as it needs.

    Args:
        quiet_s: seconds since the rank was last known to be somewhere else.
        collectives: those under way, with the seconds that each has waited and may wait.
    """
    last = SimpleNamespace(time_ns=time.time_ns() - int(quiet_s * 1e9), phase=phase)
    monkeypatch.setattr(hang, "POSITION", SimpleNamespace(last=lambda: last))
    monkeypatch.setattr(hang, "seconds_waited", lambda now: iter(collectives))
    monkeypatch.setattr(hang, "_default_store", dist.HashStore)
    comm = Comm(init_timeout_seconds=_LIMIT_S, train_timeout_seconds=_LIMIT_S)
    process = SimpleNamespace(rank=0, world_size=2)
    assert hang.HangWatch(process, comm, _SAVE_S, Path(), None)._waits_too_long() == hangs
