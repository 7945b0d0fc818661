"""Explains a hang from its ranks' records: which ranks wait where, and which never came.

The calls of a process group are numbered alike on its ranks, so that one call is the same number
everywhere: a member whose last number is smaller has not come; members that differ in the
operation, in its sizes or in the place of the same number went different ways.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import reason
from titan_moe.runtime.launch import number_ranges, ranks_in_words

_CALLS_SHOWN = 4
_MOST_LINES = 8
_PACKAGE = "titan_moe/"
# Operations to which every member must bring as much; in an exchange each brings its own.
_ALIKE = ("reduce", "gather")

Record = Mapping[str, Any]
"""The state of one rank, or a call in it: JSON-able, made by `hang.make_record`."""


class _Group(NamedTuple):
    """A process group."""

    name: str
    axes: str
    ranks: tuple[int, ...]

    @property
    def words(self) -> str:
        if self.axes == "world":
            return "all ranks"
        return f"{self.axes} group {number_ranges(self.ranks)}"


_Calls = Mapping[int, Mapping[tuple[_Group, int], Record]]
"""Calls by rank, then by their group and their number in it."""


class _Wait(NamedTuple):
    """One call of one group that some members wait in."""

    words: str
    """Such as "ranks 4-5, 7 wait in layer 2's dispatch (ep group 4-7, 3 of 4 there)"."""
    waiting: list[int]
    missing: list[int]
    """Members that have not called it, or do not answer."""


def analyse(records: Sequence[Record], world_size: int) -> list[str]:
    """Returns the lines, the cause first. `records`: of ranks that answered, in any order."""
    by_rank = {record["rank"]: record for record in records}
    calls = {rank: _own_calls(record) for rank, record in sorted(by_rank.items())}
    differing, waits = _first_difference(calls), _waits(by_rank, calls)
    waiting = {rank for wait in waits for rank in wait.waiting}
    lines = [] if differing is None else [differing]
    # Waits for a rank that waits itself are consequences.
    causes = [wait for wait in waits if set(wait.missing) - waiting]
    chained = [wait for wait in waits if wait not in causes and (wait.missing or not differing)]
    lines += [_wait_line(wait, by_rank, waiting) for wait in causes]
    if not lines and any(wait.missing for wait in chained):
        lines.append("ranks wait for each other: they called collectives in another order")
    lines += [_wait_line(wait, by_rank, waiting) for wait in chained]
    told = {rank for wait in causes for rank in wait.missing}
    lines += _places(set(range(world_size)) - by_rank.keys() - told, by_rank, waiting)
    lines += _places(by_rank.keys() - waiting - told, by_rank, waiting)
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"and {len(lines) - _MOST_LINES} lines more in the report"]
    if all(record["phase"] == "checkpoint" for record in records):
        lines.append("if the disk is only slow, raise checkpoint.save_timeout_seconds")
    steps = sorted({record["step"] for record in records if record["step"]})
    return [f"step {steps[0]}: {lines[0]}" if steps else lines[0], *lines[1:]]


def _own_calls(record: Record) -> dict[tuple[_Group, int], Record]:
    return {
        (_Group(each["name"], each["axes"], tuple(each["ranks"])), call["number"]): call
        for each in record["groups"]
        for call in each["calls"]
    }


def _waits(by_rank: Mapping[int, Record], calls: _Calls) -> list[_Wait]:
    """Returns every call that some rank waits in, the oldest first. A rank waits in its oldest call
    that has not ended, or after an error in its last one."""
    ages: defaultdict[tuple[_Group, int], dict[int, float]] = defaultdict(dict)
    for rank, own in calls.items():
        latest_first = sorted(own, key=lambda place: own[place]["seconds_ago"])
        under_way = [place for place in latest_first if not own[place]["ended"]]
        failed_in = latest_first[:1] if by_rank[rank]["error"] else []
        for place in under_way[-1:] or failed_in:
            ages[place][rank] = own[place]["seconds_ago"]
    waits = []
    for (group, number), by_age in sorted(ages.items(), key=lambda each: -max(each[1].values())):
        waiting = list(by_age)
        missing = [
            rank
            for rank in group.ranks
            if not any(of == group and later >= number for of, later in calls.get(rank, ()))
        ]
        call = calls[waiting[0]][group, number]
        words = f"{_who(waiting, 'waits', 'wait')} {call['place'] or 'in a collective'}"
        there = len(group.ranks) - len(missing)
        words += f" ({call['operation']}, {group.words}, {there} of {len(group.ranks)} there)"
        errors = [by_rank[rank]["error"] for rank in waiting if by_rank[rank]["error"]]
        waits.append(_Wait(": ".join([words, *errors[:1]]), waiting, missing))
    return waits


def _first_difference(calls: _Calls) -> str | None:
    """Describes the earliest call that members of a group did not make alike."""
    by_place: defaultdict[tuple[_Group, int], dict[int, Record]] = defaultdict(dict)
    for rank, own in calls.items():
        for place, call in own.items():
            by_place[place][rank] = call
    found = []
    for (group, number), by in by_place.items():
        if len(ways := _ways(group, by)) > 1:
            told = [f"{ranks_in_words(ranks)} called {way}" for way, ranks in ways.items()]
            line = f"{' where '.join(told)} (call {number} of {group.words})"
            found.append((max(call["seconds_ago"] for call in by.values()), line))
    return f"ranks went different ways: {max(found)[1]}" if found else None


def _ways(group: _Group, calls: Mapping[int, Record]) -> dict[str, list[int]]:
    """Returns the ways in which a call was made, as text, and the ranks of each."""
    operations = {call["operation"] for call in calls.values()}
    alike = all(any(word in each for word in _ALIKE) for each in operations)
    sized = alike and len({_size(call) for call in calls.values()}) > 1
    # Stages of a pipeline are in different layers at the same call.
    placed = "pp" not in group.axes and all(call["place"] for call in calls.values())
    ways: defaultdict[str, list[int]] = defaultdict(list)
    for rank, call in calls.items():
        words = call["operation"] + (f" of {_size(call)}" if sized else "")
        if placed:
            words += f" {call['place']}" + (f" of step {call['step']}" if call["step"] else "")
        ways[words].append(rank)
    return ways


def _size(call: Record) -> str:
    inputs = [" x ".join(map(str, shape)) or "1" for shape in call["sizes"][0]]
    return f"{', '.join(inputs)} {', '.join(call['dtypes'])}"


def _wait_line(wait: _Wait, by_rank: Mapping[int, Record], waiting: Set[int]) -> str:
    """Returns, say, "rank 5 waits in the loss (...); rank 6 is in the loader (...)"."""
    alike = ["all have called it alike: the backend does not end it"]
    return "; ".join([wait.words, *(_places(wait.missing, by_rank, waiting) or alike)])


def _places(ranks: Iterable[int], by_rank: Mapping[int, Record], waiting: Set[int]) -> list[str]:
    """Describes ranks that are missing in a call, a line for each place; those that do not answer
    last. A rank outside of collectives is in the innermost line of this package on its main stack,
    and in what that runs."""
    places: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank in sorted(ranks, key=lambda rank: (rank not in by_rank, rank in waiting, rank)):
        if rank not in by_rank:
            place = "does", "do", "not answer (stopped, killed, or Python is held)"
        elif rank in waiting:
            place = "waits", "wait", "elsewhere"
        else:
            stack = by_rank[rank]["stack"] or ["no Python frame"]
            own = [frame for frame in stack if frame.startswith(_PACKAGE)] or stack[-1:]
            within = "" if own[-1] == stack[-1] else f", within it {stack[-1].rpartition('/')[2]}"
            place = "is", "are", f"{by_rank[rank]['place']} ({own[-1]}{within})"
        places[place].append(rank)
    return [f"{_who(ranks, one, many)} {words}" for (one, many, words), ranks in places.items()]


def _who(ranks: Sequence[int], one: str, many: str) -> str:
    """Returns ranks and what they do, by the verb's two forms."""
    return f"{ranks_in_words(ranks)} {one if len(ranks) == 1 else many}"


def read_report(path: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the report in a file, or the newest one in or below a folder. Raises ConfigError."""
    found = [path] if path.is_file() else sorted(path.rglob("hang-*.json"), key=lambda p: p.name)
    if not found:
        raise ConfigError(f"{path}: no report of a hang (hang-*.json) is there or below")
    try:
        hang = json.loads(found[-1].read_bytes())
        analyse(hang["records"], hang["world_size"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError(f"{found[-1]}: no report of a hang: {reason(error)}") from None
    return found[-1], hang


def describe(hang: Record) -> list[str]:
    """Returns the findings, then each rank's position, last calls and stack; equal ranks once."""
    lines = analyse(hang["records"], hang["world_size"])
    alike: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for record in hang["records"]:
        alike[tuple(_of_a_rank(record))].append(record["rank"])
    for words, ranks in sorted(alike.items(), key=lambda each: each[1]):
        lines += ["", f"rank {number_ranges(ranks)}: {words[0]}", *words[1:]]
    return lines


def _of_a_rank(record: Record) -> list[str]:
    lines = [f"step {record['step']}, {record['place']}"]
    if record["error"]:
        lines.append(f"  {record['error']}")
    for group in record["groups"]:
        for call in group["calls"][-_CALLS_SHOWN:]:
            state = "ended" if call["ended"] else "waits"
            words = f"{call['operation']} {call['place']}, step {call['step']}"
            members = number_ranges(group["ranks"])
            lines.append(f"  {state}  {group['axes']} {members} call {call['number']}: {words}")
    lines += [f"    {frame}" for frame in record["stack"]]
    for thread, stack in record["threads"].items():
        lines += [f"  thread {thread.rpartition(' (')[0]}", *(f"    {frame}" for frame in stack)]
    return lines
