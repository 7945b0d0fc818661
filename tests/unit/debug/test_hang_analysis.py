"""Reports of hangs, of records made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run_command
from titan_moe.debug.hang_report import analyse


def call(number: int, place: str = "in the step", **changes: Any) -> dict[str, Any]:
    """A call of an all-reduce that has ended, as a record holds it."""
    return {
        "number": number,
        "operation": "all_reduce",
        "sizes": [[[4]], [[4]]],
        "dtypes": ["Float"],
        "seconds_ago": 1000.0 - number,
        "timeout_s": 130.0,
        "ended": True,
        "step": 12,
        "place": place,
        **changes,
    }


def record(rank: int, groups: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """The record that a rank makes of itself."""
    return {
        "rank": rank,
        "host": "node",
        "process": 1000 + rank,
        "step": 12,
        "phase": "step",
        "place": "in the step",
        "seconds_there": 100.0,
        "error": "",
        "groups": groups,
        "stack": ["titan_moe/train.py:9 in main", "/lib/torch/distributed.py:7 in wait"],
        "threads": {},
        **changes,
    }


def group(axes: str, ranks: list[int], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """A process group of a record."""
    return {"name": f"{axes} {ranks}", "axes": axes, "ranks": ranks, "calls": calls}


_LOADER = {
    "place": "in the loader",
    "stack": ["titan_moe/data/loader.py:52 in next_step", "/lib/threading.py:320 in wait"],
}


def _exchange(ranks: list[int], *, waits: bool) -> dict:
    """An expert-parallel group whose last call waits, or has not been made."""
    calls = [call(1, "in layer 1's dispatch", operation="all_to_all")]
    if waits:
        calls.append(call(2, "in layer 2's dispatch", operation="all_to_all", ended=False))
    return group("ep", ranks, calls)


def test_analyse_names_the_rank_in_the_loader() -> None:
    ranks = [4, 5, 6, 7]
    records = [record(rank, [_exchange(ranks, waits=True)]) for rank in (4, 5, 7)]
    records.append(record(6, [_exchange(ranks, waits=False)], **_LOADER))
    records += [record(rank, [], place="saving a checkpoint") for rank in range(4)]
    lines = analyse(records, 8)
    assert lines == [
        "step 12: ranks 4-5, 7 wait in layer 2's dispatch (all_to_all, ep group 4-7, 3 of 4 "
        "there); rank 6 is in the loader (titan_moe/data/loader.py:52 in next_step, within it "
        "threading.py:320 in wait)",
        "ranks 0-3 are saving a checkpoint (titan_moe/train.py:9 in main, within it "
        "distributed.py:7 in wait)",
    ]


def test_analyse_names_the_key_of_saves() -> None:
    saving = {"phase": "checkpoint", "place": "saving a checkpoint"}
    key = "if the disk is only slow, raise checkpoint.save_timeout_seconds"
    assert analyse([record(rank, [], **saving) for rank in range(2)], 2)[-1] == key
    assert analyse([record(0, [], **saving), record(1, [], phase="data", **_LOADER)], 2)[-1] != key


def test_analyse_begins_with_the_rank_that_64_wait_for() -> None:
    """Rank 37 is stopped; its group waits for it, and all others for that group."""
    records = []
    for rank in range(64):
        if rank == 37:
            continue
        own = list(range(rank // 8 * 8, rank // 8 * 8 + 8))
        done = group("ep", own, [call(2, "in layer 9's combine", operation="all_to_all")])
        if 37 in own:
            done["calls"][0] |= {"ended": False, "seconds_ago": 90.0}
            records.append(record(rank, [done, group("world", list(range(64)), [])]))
        else:
            reduce = call(7, "in the gradient norm", ended=False, seconds_ago=80.0)
            records.append(record(rank, [done, group("world", list(range(64)), [reduce])]))
    first, second = analyse(records, 64)
    assert first == (
        "step 12: ranks 32-36, 38-39 wait in layer 9's combine (all_to_all, ep group 32-39, 7 of 8 "
        "there); rank 37 does not answer (stopped, killed, or Python is held)"
    )
    others = "ranks 0-31, 40-63 wait in the gradient norm (all_reduce, all ranks, 56 of 64 there)"
    assert second.startswith(others)


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (
            {"operation": "all_gather"},
            "rank 0 called all_reduce in the step of step 12 where rank 1 called all_gather in",
        ),
        ({"sizes": [[[8]], [[8]]]}, "called all_reduce of 4 Float in the step of step 12 where"),
        ({"dtypes": ["Double"]}, "rank 1 called all_reduce of 4 Double in the step of step 12"),
        ({"place": "in the loss"}, "where rank 1 called all_reduce in the loss of step 12"),
    ],
)
def test_analyse_names_the_first_call_that_differs(theirs: dict, says: str) -> None:
    last = {"ended": False}
    ours = group("world", [0, 1], [call(4), call(5, **last), call(6, **last)])
    other = group("world", [0, 1], [call(4), call(5, **last, **theirs), call(6, "in the loss")])
    (line,) = analyse([record(0, [ours]), record(1, [other])], 2)
    assert line.startswith("step 12: ranks went different ways: ") and says in line
    assert line.endswith("(call 5 of all ranks)")


def test_analyse_allows_other_sizes_of_exchanges_and_other_stages() -> None:
    sizes = {"operation": "all_to_all", "sizes": [[[8]], [[4]]]}
    mine = [
        group("ep", [0, 1], [call(1, operation="all_to_all")]),
        group("pp", [0, 1], [call(1, "in layer 1")]),
    ]
    theirs = [group("ep", [0, 1], [call(1, **sizes)]), group("pp", [0, 1], [call(1, "in layer 5")])]
    lines = analyse([record(0, mine), record(1, theirs)], 2)
    assert len(lines) == 1 and lines[0].startswith("step 12: ranks 0-1 are in the step")


def test_analyse_names_ranks_that_wait_for_each_other() -> None:
    waits = [call(1, "in layer 3's attention", ended=False)]
    first = record(0, [group("tp", [0, 1], waits), group("ep", [0, 1], [])])
    second = record(1, [group("tp", [0, 1], []), group("ep", [0, 1], waits)])
    lines = analyse([first, second], 2)
    assert lines[0].endswith("wait for each other: they called collectives in another order")
    assert "rank 0 waits in layer 3's attention (all_reduce, tp group 0-1, 1 of 2" in lines[1]
    assert "rank 1 waits in layer 3's attention (all_reduce, ep group 0-1, 1 of 2" in lines[2]


def test_analyse_takes_the_oldest_open_call() -> None:
    first = call(1, "in layer 3's dispatch", ended=False, seconds_ago=99.0)
    later = call(1, "in layer 4", ended=False, seconds_ago=98.0)
    waits = record(0, [group("fsdp", [0, 1], [later]), group("ep", [0, 1], [first])])
    lines = analyse([waits, record(1, [])], 2)
    assert "rank 0 waits in layer 3's dispatch (all_reduce, ep group 0-1, 1 of 2" in lines[0]


def test_analyse_blames_the_backend_for_a_common_call() -> None:
    waits = [call(1, "in the loss", ended=False)]
    records = [record(rank, [group("world", [0, 1], waits)]) for rank in range(2)]
    (line,) = analyse(records, 2)
    assert "ranks 0-1 wait in the loss (all_reduce, all ranks, 2 of 2 there)" in line
    assert line.endswith("; all have called it alike: the backend does not end it")


def test_analyse_places_the_error_of_a_collective() -> None:
    ended = group("world", [0, 1], [call(3), call(4, "in the loss")])
    (line,) = analyse([record(0, [ended], error="Connection closed by peer")], 2)
    assert "rank 0 waits in the loss (all_reduce, all ranks, 1 of 2 there)" in line
    assert "Connection closed by peer; rank 1 does not answer" in line


def test_analyse_names_a_silent_rank_that_nobody_waits_for() -> None:
    assert "rank 1 does not answer" in " ".join(analyse([record(0, [])], 2))


def test_report_hang_reads_the_newest_report(tmp_path: Path) -> None:
    folder = tmp_path / "comm_traces"
    records = [
        record(0, [_exchange([0, 1], waits=True)]),
        record(1, [_exchange([0, 1], waits=False)], **_LOADER),
    ]
    folder.mkdir()
    path = folder / "hang-20200101-000000.json"
    path.write_text(json.dumps({"world_size": 2, "records": records}))
    shown = run_command("report", "hang", str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0] == str(path) and "; rank 1 is in the loader" in lines[1]
    assert "  waits  ep 0-1 call 2: all_to_all in layer 2's dispatch, step 12" in lines
    (folder / "hang-30000101-000000.json").write_text(json.dumps({"records": 3}))
    for wrong in (folder, tmp_path / "nothing"):
        refused = run_command("report", "hang", str(wrong))
        (line,) = refused.stderr.splitlines()
        assert refused.returncode == 2 and "no report of a hang" in line
        assert "Error" not in line
