"""Explains a hang from its ranks' records: which ranks wait where, and which never came.

The calls of a process group are numbered alike on its ranks, so that one call is the same number
everywhere: a member whose last number is smaller has not come; members that differ in the
operation, in its sizes or in the place of the same number went different ways.
"""

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import reason
from titan_moe.runtime.launch import number_ranges, ranks_in_words

_CALLS_SHOWN = 4
_MOST_LINES = 8
_PACKAGE = "titan_moe/"
# Operations to which every member must bring as much; in an exchange each brings its own.
_ALIKE = ("reduce", "gather")


@dataclass
class _Group:
    """A process group, by the calls of those members that answered."""

    axes: str
    ranks: list[int]
    calls: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    """The calls by rank, then by the call's number in its group."""

    @property
    def words(self) -> str:
        if self.axes == "world":
            return "all ranks"
        return f"{self.axes} group {number_ranges(self.ranks)}"

    def has_called(self, rank: int, number: int) -> bool:
        return max(self.calls.get(rank, ()), default=0) >= number


@dataclass(frozen=True)
class _Wait:
    """One call of one group that some members wait in."""

    group: _Group
    number: int
    waiting: list[int]
    absent: list[int]
    """Members that answered and have not called it."""
    silent: list[int]


def analyse(records: Sequence[Mapping[str, Any]], world_size: int) -> list[str]:
    """Returns the lines, the cause first. `records`: of ranks that answered, in any order."""
    by_rank = {record["rank"]: record for record in records}
    silent = [rank for rank in range(world_size) if rank not in by_rank]
    groups = _groups(by_rank)
    differing = _first_difference(groups)
    waits = _waits(by_rank, groups, silent)
    waiting = {rank for wait in waits for rank in wait.waiting}
    outside = {rank: record for rank, record in by_rank.items() if rank not in waiting}

    lines = [] if differing is None else [differing]
    # Waits for a rank that waits itself are consequences.
    causes = [wait for wait in waits if wait.silent or set(wait.absent) & outside.keys()]
    chained = [wait for wait in waits if wait not in causes and (wait.absent or not differing)]
    told: set[int] = set()
    for wait in causes:
        lines.append(f"{_wait_words(wait, by_rank)}{_absent_words(wait, outside)}")
        told |= {*wait.absent, *wait.silent}
    if not lines and any(wait.absent for wait in chained):
        lines.append("ranks wait for each other: they called collectives in another order")
    lines += [f"{_wait_words(wait, by_rank)}{_chain_words(wait)}" for wait in chained]
    if rest := [rank for rank in silent if rank not in told]:
        lines.append(f"{ranks_in_words(rest)} {_silence(rest)}")
    lines += _places({rank: each for rank, each in outside.items() if rank not in told})
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"and {len(lines) - _MOST_LINES} lines more in the report"]
    if all(record["phase"] == "checkpoint" for record in records):
        lines.append("if the disk is only slow, raise checkpoint.save_timeout_seconds")
    steps = sorted({record["step"] for record in records if record["step"]})
    return [f"step {steps[0]}: {lines[0]}" if steps else lines[0], *lines[1:]]


def _groups(by_rank: Mapping[int, Mapping[str, Any]]) -> list[_Group]:
    groups: dict[tuple[str, tuple[int, ...]], _Group] = {}
    for rank, record in sorted(by_rank.items()):
        for each in record["groups"]:
            key = each["name"], tuple(each["ranks"])
            group = groups.setdefault(key, _Group(each["axes"], each["ranks"]))
            group.calls[rank] = {call["number"]: call for call in each["calls"]}
    return list(groups.values())


def _waits(
    by_rank: Mapping[int, Mapping[str, Any]], groups: Sequence[_Group], silent: Sequence[int]
) -> list[_Wait]:
    """Returns every call that some rank waits in, the oldest first."""
    waiting: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    ages: dict[tuple[int, int], float] = {}
    for rank, record in sorted(by_rank.items()):
        found = _waits_in(rank, record, groups)
        if found is not None:
            index, call = found
            key = index, call["number"]
            waiting[key].append(rank)
            ages[key] = max(ages.get(key, 0.0), call["seconds_ago"])
    waits = []
    for (index, number), ranks in sorted(waiting.items(), key=lambda each: -ages[each[0]]):
        group = groups[index]
        absent = [
            rank for rank in group.ranks if rank in by_rank and not group.has_called(rank, number)
        ]
        lost = [rank for rank in group.ranks if rank in silent]
        waits.append(_Wait(group, number, ranks, absent, lost))
    return waits


def _waits_in(
    rank: int, record: Mapping[str, Any], groups: Sequence[_Group]
) -> tuple[int, Mapping[str, Any]] | None:
    """Returns the group's index and the call: the oldest that has not ended, or after an error the
    last."""
    calls = [
        (index, call)
        for index, group in enumerate(groups)
        for call in group.calls.get(rank, {}).values()
    ]
    if open_calls := [each for each in calls if not each[1]["ended"]]:
        return max(open_calls, key=lambda each: each[1]["seconds_ago"])
    if record["error"] and calls:
        return min(calls, key=lambda each: each[1]["seconds_ago"])
    return None


def _first_difference(groups: Sequence[_Group]) -> str | None:
    """Describes the earliest call that members of a group did not make alike."""
    found = []
    for group in groups:
        kept = sorted({number for calls in group.calls.values() for number in calls})
        for number in kept:
            calls = {rank: by[number] for rank, by in group.calls.items() if number in by}
            if len(ways := _ways(group, calls)) > 1:
                age = max(call["seconds_ago"] for call in calls.values())
                found.append((age, group, number, ways))
                break
    if not found:
        return None
    _, group, number, ways = max(found, key=lambda each: each[0])
    told = [f"{ranks_in_words(ranks)} called {way}" for way, ranks in ways.items()]
    return f"ranks went different ways: {' where '.join(told)} (call {number} of {group.words})"


def _ways(group: _Group, calls: Mapping[int, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Returns the ways in which a call was made, as text, and the ranks of each."""
    operations = {call["operation"] for call in calls.values()}
    alike = all(any(word in each for word in _ALIKE) for each in operations)
    sized = alike and len({_size(call) for call in calls.values()}) > 1
    # Stages of a pipeline are in different layers at the same call.
    placed = "pp" not in group.axes and all(call["place"] for call in calls.values())
    ways: defaultdict[str, list[int]] = defaultdict(list)
    for rank, call in calls.items():
        words = call["operation"] + (f" of {_size(call)}" if sized else "")
        ways[f"{words} {_place(call)}" if placed else words].append(rank)
    return ways


def _size(call: Mapping[str, Any]) -> str:
    inputs = [" x ".join(map(str, shape)) or "1" for shape in call["sizes"][0]]
    return f"{', '.join(inputs)} {', '.join(call['dtypes'])}"


def _place(call: Mapping[str, Any]) -> str:
    return f"{call['place']} of step {call['step']}" if call["step"] else call["place"]


def _wait_words(wait: _Wait, by_rank: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns, say, "ranks 4-5, 7 wait in layer 2's dispatch (ep group 4-7, 3 of 4 there)"."""
    calls = [wait.group.calls[rank][wait.number] for rank in wait.waiting]
    size = len(wait.group.ranks)
    there = size - len(wait.absent) - len(wait.silent)
    failed = next((by_rank[rank]["error"] for rank in wait.waiting if by_rank[rank]["error"]), "")
    verb = "waits" if len(wait.waiting) == 1 else "wait"
    words = f"{ranks_in_words(wait.waiting)} {verb} {calls[0]['place'] or 'in a collective'}"
    words += f" ({calls[0]['operation']}, {wait.group.words}, {there} of {size} there)"
    return f"{words}: {failed}" if failed else words


def _absent_words(wait: _Wait, outside: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns, say, "; rank 6 is in the loader (titan_moe/data/loader.py:52 in next_step)"."""
    lines = _places({rank: outside[rank] for rank in wait.absent if rank in outside})
    if chained := [rank for rank in wait.absent if rank not in outside]:
        lines.append(f"{ranks_in_words(chained)} waits elsewhere")
    if wait.silent:
        lines.append(f"{ranks_in_words(wait.silent)} {_silence(wait.silent)}")
    return "".join(f"; {line}" for line in lines)


def _chain_words(wait: _Wait) -> str:
    if not wait.absent:
        return "; all have called it alike: the backend does not end it"
    return (
        f"; {ranks_in_words(wait.absent)} {'waits' if len(wait.absent) == 1 else 'wait'} elsewhere"
    )


def _places(outside: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Describes ranks that wait in no collective, a line for each place."""
    places: defaultdict[str, list[int]] = defaultdict(list)
    for rank, record in outside.items():
        places[_where(record)].append(rank)
    return [
        f"{ranks_in_words(ranks)} {'is' if len(ranks) == 1 else 'are'} {place}"
        for place, ranks in places.items()
    ]


def _where(record: Mapping[str, Any]) -> str:
    """Describes a position: the innermost line of this package on the main stack, and what it
    runs."""
    stack = record["stack"] or ["no Python frame"]
    own = [frame for frame in stack if frame.startswith(_PACKAGE)] or stack[-1:]
    within = "" if own[-1] == stack[-1] else f", within it {stack[-1].rpartition('/')[2]}"
    return f"{record['place']} ({own[-1]}{within})"


def _silence(ranks: Sequence[int]) -> str:
    verb = "does" if len(ranks) == 1 else "do"
    return f"{verb} not answer (stopped, killed, or Python is held)"


def write_report(folder: Path, world_size: int, records: Sequence[Mapping[str, Any]]) -> Path:
    """Write a report whole, or not at all; returns its path. Raises OSError."""
    path = folder / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.json"
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    hang = {"world_size": world_size, "records": records}
    partial.write_text(json.dumps(hang), encoding="utf-8")
    partial.rename(path)
    return path


def read_report(path: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the report in a file, or the newest one in or below a folder. Raises ConfigError."""
    found = [path] if path.is_file() else sorted(path.rglob("hang-*.json"), key=lambda p: p.name)
    if not found:
        raise ConfigError(f"{path}: no report of a hang (hang-*.json) is there or below")
    try:
        hang = json.loads(found[-1].read_bytes())
        analyse(hang["records"], hang["world_size"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OSError) as error:
        raise ConfigError(f"{found[-1]}: no report of a hang: {reason(error)}") from None
    return found[-1], hang


def describe(hang: Mapping[str, Any]) -> list[str]:
    """Returns the findings, then each rank's position, last calls and stack; equal ranks once."""
    lines = analyse(hang["records"], hang["world_size"])
    alike: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for record in hang["records"]:
        alike[tuple(_of_a_rank(record))].append(record["rank"])
    for words, ranks in sorted(alike.items(), key=lambda each: each[1]):
        lines += ["", f"rank {number_ranges(ranks)}: {words[0]}", *words[1:]]
    return lines


def _of_a_rank(record: Mapping[str, Any]) -> list[str]:
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
