"""Checks that all members of every group issue the same sequence of collectives.

Equal on all members: operation, type, sizes, and the place in the step. What rank i sends to rank
j in an all-to-all is what j receives from i. Sends and receives match pair by pair, in order. And
groups are not met in such orders that each rank waits for another one.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from titan_moe.runtime.launch import number_ranges, ranks_in_words
from titan_moe.simulate.issued import Issued


class Group(NamedTuple):
    """A process group, as all of its ranks know it."""

    name: str
    ranks: tuple[int, ...]
    axes: str

    def __str__(self) -> str:
        return f"{self.axes} group {number_ranges(self.ranks)}"


class RankLog(NamedTuple):
    """Holds the operations that one rank issued in a step."""

    issued: Sequence[Issued]
    groups: Sequence[Group]
    """Groups that the rank has made so far, in order."""
    is_whole: bool
    """True if the step ran to its end."""


class Finding(NamedTuple):
    """Describes one place where members of a group disagree or wait in vain."""

    group: str
    text: str
    number: int
    """Number of collectives that the differing rank had issued before, in any group."""


def find_desyncs(logs: Mapping[int, RankLog], *, has_failed: bool = False) -> list[Finding]:
    """Returns all groups whose members differ, with the first place of each, the earliest first.

    Args:
        has_failed: a rank has raised an error, so that others may wait for it.
    """
    groups = {group.name: group for log in logs.values() for group in log.groups}
    found = list(_unequally_made(groups, logs))
    if not found:
        for group in groups.values():
            for what, calls in _sequences(group, logs).items():
                found += _unequal(group, logs, what, calls)
    if not found and not has_failed:
        found = list(_crossed(groups, logs))
    return sorted(found, key=lambda finding: finding.number)


_ByRank = Mapping[int, Sequence[Issued]]


def _unequally_made(groups: Mapping[str, Group], logs: Mapping[int, RankLog]) -> Iterator[Finding]:
    """Torch names a group by its ranks and by how many groups a rank has made before."""
    made = {rank: [own.name for own in log.groups] for rank, log in logs.items()}
    for group in groups.values():
        absent = [r for r in group.ranks if logs[r].is_whole and group.name not in made[r]]
        there = [rank for rank in group.ranks if group.name in made[rank]]
        if absent:
            place = made[there[0]].index(group.name)
            text = (
                f"made by {ranks_in_words(there)} as {_ordinal(place)} group after the world's, "
                f"but not by {ranks_in_words(absent)}"
            )
            yield Finding(str(group), text, place)


def _sequences(group: Group, logs: Mapping[int, RankLog]) -> dict[str, _ByRank]:
    """Returns calls that must be alike, by what they are and by rank: the collectives of all
    members, and for each pair and direction the sends of one rank and the receives of the other."""
    sequences: dict[str, dict[int, list[Issued]]] = {"collective": {r: [] for r in group.ranks}}
    for rank in group.ranks:
        for issued in logs[rank].issued:
            if issued.group != group.name:
                continue
            calls = sequences["collective"]
            if issued.is_pair:
                peer = group.ranks[issued.peer]
                source, target = (rank, peer) if issued.op == "send" else (peer, rank)
                what = f"message from rank {source} to rank {target}"
                calls = sequences.setdefault(what, {source: [], target: []})
            calls[rank].append(issued)
    return dict(sequences)


def _unequal(
    group: Group, logs: Mapping[int, RankLog], what: str, calls: _ByRank
) -> Iterator[Finding]:
    """Yields the first place at which ranks differ, if there is one."""
    for place in range(max(map(len, calls.values()))):
        nth = f"{_ordinal(place + 1)} {what}"
        # A call that an unfinished step lacks says nothing.
        seen = {
            rank: own[place] if place < len(own) else None
            for rank, own in calls.items()
            if place < len(own) or logs[rank].is_whole
        }
        sides: dict[Hashable, list[int]] = {}
        for rank, each in seen.items():
            sides.setdefault(each and each.rule, []).append(rank)
        if len(sides) > 1:
            yield _parted(group, nth, seen, list(sides.values()))
            return
        there = {rank: each for rank, each in seen.items() if each is not None}
        if finding := _wrong_splits(group, nth, there):
            yield finding
            return


def _parted(
    group: Group, nth: str, seen: Mapping[int, Issued | None], sides: list[list[int]]
) -> Finding:
    ordered = sorted(sides, key=len)  # The usual side comes last.
    numbers = [
        [each.number for rank in ranks if (each := seen[rank]) is not None] for ranks in ordered
    ]
    first = [number for of_side in numbers[:-1] for number in of_side] or numbers[-1]
    text = "; ".join(_side(ranks, seen[ranks[0]], nth) for ranks in ordered)
    return Finding(str(group), text, min(first))


def _side(ranks: list[int], each: Issued | None, nth: str) -> str:
    verb = "issues" if len(ranks) == 1 else "issue"
    what = f"no {nth}" if each is None else f"{each} as {nth} in {each.place}"
    return f"{ranks_in_words(ranks)} {verb} {what}"


def _wrong_splits(group: Group, nth: str, seen: Mapping[int, Issued]) -> Finding | None:
    for i, sender in enumerate(group.ranks):
        for j, receiver in enumerate(group.ranks):
            if not (sender in seen and receiver in seen and seen[sender].sends):
                continue
            each, received = seen[sender], seen[receiver].receives[i]
            if (sent := each.sends[j]) != received:
                text = (
                    f"rank {sender} sends {sent} elements to rank {receiver}, which receives "
                    f"{received} from it, in {each} as {nth}, in {each.place}"
                )
                return Finding(str(group), text, each.number)
    return None


def _crossed(groups: Mapping[str, Group], logs: Mapping[int, RankLog]) -> Iterator[Finding]:
    """Yields the calls that ranks wait in for ever if each goes on when all members have come."""
    calls: dict[int, list[tuple[tuple[str, int], Issued]]] = {rank: [] for rank in logs}
    for rank, log in logs.items():
        counts: Counter[str] = Counter()
        for issued in log.issued:
            if not issued.is_pair:
                counts[issued.group] += 1
                calls[rank].append(((issued.group, counts[issued.group]), issued))
    at = dict.fromkeys(calls, 0)
    waiting: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    ready = list(calls)
    while ready:
        rank = ready.pop()
        if at[rank] < len(calls[rank]):
            node, _ = calls[rank][at[rank]]
            waiting[node].append(rank)
            if len(waiting[node]) == len(groups[node[0]].ranks):
                ready += waiting.pop(node)
                for member in groups[node[0]].ranks:
                    at[member] += 1
    for (name, count), ranks in waiting.items():
        first = min(ranks)
        _, each = calls[first][at[first]]
        side = _side(sorted(ranks), each, f"{_ordinal(count)} collective")
        text = f"{side}; another member first waits in another group, and so on in a circle"
        yield Finding(str(groups[name]), text, each.number)


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{ending or 'th'}"
