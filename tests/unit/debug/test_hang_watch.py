"""A rank decides that a run hangs."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from titan_moe.comm.process import BACKEND_GRACE_S
from titan_moe.config.job_config import Comm
from titan_moe.debug import hang

_LIMIT_S = 100
_SAVE_S = 2000
_LONGEST_S = _SAVE_S + BACKEND_GRACE_S


@pytest.mark.parametrize(
    ("quiet_s", "phase", "collectives", "hangs"),
    [
        (_LIMIT_S + 1, "checkpoint", [(_LIMIT_S, _LIMIT_S, "nccl:send 0->1")], False),
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
    quiet_s: float, phase: str, collectives: list, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective past its own limit; or a rank that is silent longer than a save may take, except
    in a start, which compiles and reads as long as it needs.

    Args:
        quiet_s: seconds since the rank was last known to be somewhere else.
        collectives: those under way, with the seconds that each has waited and may wait; with a
            name, a send that torch has joined with others.
    """
    last = SimpleNamespace(time_ns=time.time_ns() - int(quiet_s * 1e9), phase=phase)
    monkeypatch.setattr(hang, "POSITION", SimpleNamespace(last=lambda: last))
    under_way = [
        entry("gloo", 1, ended=False)
        | {"time_created_ns": time.time_ns() - int(waited * 1e9), "timeout_ms": limit * 1000}
        | ({"is_p2p": True, "state": "scheduled", "profiling_name": p2p[0]} if p2p else {})
        for waited, limit, *p2p in collectives
    ]
    monkeypatch.setattr(hang, "_recorded", lambda: [*under_way, entry("gloo", 2, ended=True)])
    comm = Comm(init_timeout_seconds=_LIMIT_S, train_timeout_seconds=_LIMIT_S)
    process = SimpleNamespace(rank=0, world_size=2)
    assert hang.HangWatch(process, comm, _SAVE_S, Path(), None)._waits_too_long() == hangs


def entry(library: str, number: int, *, ended: bool) -> dict[str, Any]:
    """An entry of a flight recorder, of a call in the world's group."""
    return {
        "process_group": ["0", "default_pg"],
        "profiling_name": f"{library}:all_reduce",
        "record_id": number,
        "collective_seq_id": number,
        "is_p2p": False,
        "retired": ended,
        "state": "completed" if ended else "started",
        "time_created_ns": 0,
        "timeout_ms": 1000,
        "input_sizes": [[1]],
        "output_sizes": [[1]],
        "input_dtypes": ["Float"],
    }


def test_calls_of_nccl_stand_beside_those_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build with NCCL has two recorders, and each library counts the calls of a group."""
    recorders = {
        "_dump_fr_trace_json": [entry("gloo", 1, ended=True), entry("gloo", 2, ended=True)],
        "_dump_nccl_trace_json": [entry("nccl", 1, ended=True), entry("nccl", 2, ended=False)],
    }
    for name, entries in recorders.items():
        dump = json.dumps({"entries": entries})
        monkeypatch.setattr(hang.c10d, name, lambda *_, dump=dump: dump, raising=False)
    world = type("World", (), {"group_desc": "default_pg"})()
    monkeypatch.setattr(hang, "_world", SimpleNamespace(pg_names={world: "0"}))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    groups = {group["name"]: group["calls"] for group in hang.make_record(0)["groups"]}
    ended = {name: [call["ended"] for call in calls] for name, calls in groups.items()}
    assert ended == {"0 gloo": [True, True], "0 nccl": [True, False]}
    limits = [call["timeout_s"] for calls in groups.values() for call in calls]
    assert limits == [1.0, 1.0, 1.0, 1.0]
