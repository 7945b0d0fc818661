"""The first difference between members of a group, in words, from logs written by hand."""

import pytest

from titan_moe.simulate.desync import Group, RankLog, find_desyncs
from titan_moe.simulate.issued import Issued
from titan_moe.simulate.whereabouts import Place

_EP = Group("ep", (4, 5, 6, 7), "ep")
_PP = Group("pp", (4, 5), "pp")
_TP = Group("tp", (6, 7), "tp")
_OTHER = Group("other", (5, 6), "cp")
_HERE = Place("forward", "layers.2", "dispatch", "a.py:f")
_THERE = Place("backward", "layers.1", "combine", "")


def _issued(op: str = "all_reduce", group: Group = _EP, **changed) -> Issued:  # type: ignore[no-untyped-def]
    plain = Issued(group.name, op, "float32", (4,), (), (), -1, 0, _HERE)
    return plain._replace(**changed)


_REDUCE = _issued()
_GATHER = _issued("all_gather", dtype="bfloat16", sizes=(8,))


def _logs(*broken_off: int, **by_rank: list[Issued]) -> dict[int, RankLog]:
    """Each rank issues the same but for those that are named, as r6=[...]."""
    logs = {}
    for rank in (4, 5, 6, 7):
        groups = [group for group in (_EP, _PP, _TP, _OTHER) if rank in group.ranks]
        issued = by_rank.get(f"r{rank}", by_rank.get("others", []))
        numbered = [each._replace(number=number) for number, each in enumerate(issued)]
        logs[rank] = RankLog(numbered, groups, is_whole=rank not in broken_off)
    return logs


def _found(logs: dict[int, RankLog]) -> tuple[str, str]:
    (finding,) = find_desyncs(logs)
    return finding.group, finding.text


def test_unequal_operations_name_both_sides_and_their_places() -> None:
    logs = _logs(others=[_REDUCE, _GATHER], r6=[_REDUCE, _REDUCE._replace(place=_THERE)])
    assert _found(logs) == (
        "ep group 4-7",
        "rank 6 issues all_reduce float32[4] as 2nd collective in layers.1's combine, backward; "
        "ranks 4-5, 7 issue all_gather bfloat16[8] as 2nd collective in layers.2's dispatch, "
        "forward, a.py:f",
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "float64"},
        {"sizes": (5,)},
        {"sizes": (4, 4)},
        {"peer": 1},
        {"place": _HERE._replace(layer="layers.3")},
    ],
)
def test_type_sizes_root_and_place_are_compared(changed: dict) -> None:
    logs = _logs(others=[_REDUCE], r5=[_REDUCE._replace(**changed)])
    assert _found(logs)[1].startswith("rank 5 issues all_reduce")


def test_rank_that_omits_the_last_collective_is_named() -> None:
    text = _found(_logs(others=[_GATHER, _REDUCE], r7=[_GATHER]))[1]
    assert text.startswith("rank 7 issues no 2nd collective; ranks 4-6 issue all_reduce")


def test_collectives_missing_after_a_broken_off_step_are_no_finding() -> None:
    logs = _logs(7, others=[_GATHER, _REDUCE], r7=[_GATHER])
    assert not find_desyncs(logs, has_failed=True)


def test_all_to_all_whose_receiver_expects_other_sizes_is_found() -> None:
    def exchange(rank: int) -> Issued:
        rows = [[1, 2, 3, 4], [5, 6, 7, 8], [0, 0, 0, 0], [9, 1, 2, 3]]
        me = rank - 4
        return _issued("all_to_all", sizes=(), sends=tuple(rows[me]),
                       receives=tuple(row[me] for row in rows))  # fmt: skip

    logs = {f"r{rank}": [exchange(rank)] for rank in (4, 5, 6, 7)}
    assert not find_desyncs(_logs(**logs))
    logs["r7"] = [exchange(7)._replace(receives=(4, 9, 0, 3))]
    text = _found(_logs(**logs))[1]
    assert text.startswith("rank 5 sends 8 elements to rank 7, which receives 9 from it")


def _message(op: str, peer: int, size: int, **changed) -> Issued:  # type: ignore[no-untyped-def]
    return _issued(op, _PP, peer=peer, sizes=(size,), **changed)


def test_sends_that_do_not_match_receives_in_order_are_found() -> None:
    sends = [_message("send", 1, 3), _message("send", 1, 5)]
    receives = [_message("receive", 0, 3), _message("receive", 0, 5)]
    assert not find_desyncs(_logs(r4=sends, r5=receives))
    text = _found(_logs(r4=sends, r5=receives[::-1]))[1]
    assert text == (
        "rank 4 issues send float32[3] as 1st message from rank 4 to rank 5 in layers.2's "
        "dispatch, forward, a.py:f; rank 5 issues receive float32[5] as 1st message from rank 4 to "
        "rank 5 in layers.2's dispatch, forward, a.py:f"
    )
    text = _found(_logs(r4=sends, r5=receives[:1]))[1]
    assert "rank 5 issues no 2nd message from rank 4 to rank 5" in text
    assert not find_desyncs(_logs(5, r4=sends, r5=receives[:1]))
    tagged = [receives[0]._replace(tag=7), receives[1]]
    assert "with tag 7" in _found(_logs(r4=sends, r5=tagged))[1]


def test_groups_met_in_a_circle_are_found() -> None:
    # 5 waits for 6 on cp, 6 for 7 on tp, 7 for 5 on ep.
    ep, tp, cp = _issued(group=_EP), _issued(group=_TP), _issued(group=_OTHER)
    straight = {"r4": [ep], "r5": [cp, ep], "r6": [cp, tp, ep], "r7": [tp, ep]}
    assert not find_desyncs(_logs(**straight))
    found = find_desyncs(_logs(**straight | {"r6": [tp, cp, ep], "r7": [ep, tp]}))
    assert {finding.group for finding in found} == {"ep group 4-7", "tp group 6-7", "cp group 5-6"}
    assert all("in a circle" in finding.text for finding in found)


def test_group_that_a_member_has_not_made_is_found() -> None:
    logs = _logs(others=[_REDUCE])
    logs[7] = logs[7]._replace(groups=[_TP])
    group, text = _found(logs)
    assert group == "ep group 4-7" and text.endswith("but not by rank 7")


def test_ranks_that_wait_for_each_other_in_two_groups_are_named() -> None:
    other = _issued("broadcast", group=_PP, place=_THERE)
    logs = _logs(4, 5, 6, 7, others=[_GATHER, _REDUCE], r5=[_GATHER, other])
    assert not find_desyncs(logs, has_failed=True)  # They may wait for the rank that has failed.
    first, second = find_desyncs(logs)
    assert first.group == "ep group 4-7" and second.group == "pp group 4-5"
    assert first.text.startswith("ranks 4, 6-7 issue all_reduce float32[4] as 2nd collective")
    assert second.text.startswith("rank 5 issues broadcast float32[4] as 1st collective")
