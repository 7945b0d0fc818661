"""Checks that all members of every group issue the same sequence of collectives.

Equal on all members: operation, type, sizes, and the place in the step. What rank i sends to rank
j in an all-to-all is what j receives from i. Sends and receives match pair by pair, in order. And
groups are not met in such orders that each rank waits for another one.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from titan_moe.simulate.issued import Issued

_Node = TypeVar("_Node", bound=Hashable)


class Group(NamedTuple):
    """A process group, as all of its ranks know it."""

    name: str
    ranks: tuple[int, ...]
    axes: str

    def __str__(self) -> str:
        return f"{self.axes} group {in_words(self.ranks)}"


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
    """Collectives that the rank which parts had issued before, in any group."""


def find_desyncs(logs: Mapping[int, RankLog]) -> list[Finding]:
    """All groups whose members part, with the first place of each; the earliest first."""
    groups = {group.name: group for log in logs.values() for group in log.groups}
    if found := list(_unequally_made(groups, logs)):
        return sorted(found, key=lambda finding: finding.number)
    for group in groups.values():
        numbered = {rank: _numbered(logs[rank].issued, group.name) for rank in group.ranks}
        found += _unequal(group, logs, numbered)
        found += _unpaired(group, logs, numbered)
    if not found and all(log.is_whole for log in logs.values()):
        found = list(_crossed(groups, logs))
    return sorted(found, key=lambda finding: finding.number)


def find_waits(logs: Mapping[int, RankLog]) -> list[Finding]:
    """Returns one finding for each group in which ranks of an interrupted part wait, the earliest
    first."""
    groups = {group.name: group for log in logs.values() for group in log.groups}
    waits = {
        rank: _Numbered(len(log.issued) - 1, log.issued[-1])
        for rank, log in logs.items()
        if not log.is_whole and log.issued
    }
    found = []
    for name in dict.fromkeys(each.issued.group for each in waits.values()):
        group = groups[name]
        there = [rank for rank in group.ranks if rank in waits and waits[rank].issued.group == name]
        number, issued = waits[there[0]]
        text = f"{_who(there)} {_waits(there)} in {issued}, {issued.place}"
        for rank in [rank for rank in group.ranks if rank in waits and rank not in there][:1]:
            other = waits[rank].issued
            text += f"; {_who([rank])} waits in {groups[other.group]}, {other}, {other.place}"
        found.append(Finding(str(group), text, number))
    return sorted(found, key=lambda finding: finding.number)


def in_words(ranks: Iterable[int]) -> str:
    """Ranks as "0, 2, 4-7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


class _Numbered(NamedTuple):
    number: int
    """Among all that the rank issued."""
    issued: Issued


def _numbered(issued: Sequence[Issued], group: str) -> list[_Numbered]:
    return [_Numbered(n, each) for n, each in enumerate(issued) if each.group == group]


_ByRank = Mapping[int, list[_Numbered]]


# --- groups ---


def _unequally_made(groups: Mapping[str, Group], logs: Mapping[int, RankLog]) -> Iterator[Finding]:
    """Torch names a group by its ranks and by how many groups a rank has made before."""
    made = {rank: [own.name for own in log.groups] for rank, log in logs.items()}
    for group in groups.values():
        absent = [r for r in group.ranks if logs[r].is_whole and group.name not in made[r]]
        there = [rank for rank in group.ranks if group.name in made[rank]]
        if absent:
            place = made[there[0]].index(group.name)
            text = (
                f"made by {_who(there)} as {_ordinal(place)} group after the world's, but not by "
                f"{_who(absent)}"
            )
            yield Finding(str(group), text, place)


# --- collectives ---


def _unequal(group: Group, logs: Mapping[int, RankLog], numbered: _ByRank) -> Iterator[Finding]:
    own = {
        rank: [each for each in numbered[rank] if not each.issued.is_pair] for rank in group.ranks
    }
    for place in range(max(map(len, own.values()))):
        # Where a step was broken off, what it lacks says nothing.
        seen = {
            rank: calls[place] if place < len(calls) else None
            for rank, calls in own.items()
            if place < len(calls) or logs[rank].is_whole
        }
        rules = {rank: each and each.issued.rule for rank, each in seen.items()}
        if len(set(rules.values())) > 1:
            yield _parted(group, place, seen, rules)
            return
        there = {rank: each for rank, each in seen.items() if each is not None}
        if finding := _wrong_splits(group, place, there):
            yield finding
            return


def _parted(
    group: Group, place: int, seen: Mapping[int, _Numbered | None], rules: Mapping[int, Hashable]
) -> Finding:
    (usual, _), *_ = Counter(rules.values()).most_common(1)
    others = [rank for rank, rule in rules.items() if rule == usual]
    parted = [rank for rank, rule in rules.items() if rule != usual]
    sides = [_side([rank for rank in parted if rules[rank] == rule], seen, place)
             for rule in dict.fromkeys(rules[rank] for rank in parted)]  # fmt: skip
    text = f"{'; '.join(sides)}; {_side(others, seen, place)}"
    first = [each.number for rank in parted if (each := seen[rank]) is not None]
    last = [each.number for each in seen.values() if each is not None]
    return Finding(str(group), text, min(first or last))


def _side(ranks: Sequence[int], seen: Mapping[int, _Numbered | None], place: int) -> str:
    who = _who(ranks)
    verb = "issues" if len(ranks) == 1 else "issue"
    each = seen[ranks[0]]
    if each is None:
        return f"{who} {verb} no {_ordinal(place + 1)} collective"
    what = f"{each.issued} as {_ordinal(place + 1)} collective"
    return f"{who} {verb} {what} in {each.issued.place}"


def _who(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {in_words(ranks)}"


def _waits(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _wrong_splits(group: Group, place: int, seen: Mapping[int, _Numbered]) -> Finding | None:
    for i, sender in enumerate(group.ranks):
        for j, receiver in enumerate(group.ranks):
            if not (sender in seen and receiver in seen and seen[sender].issued.sends):
                continue
            sent, received = seen[sender].issued.sends[j], seen[receiver].issued.receives[i]
            if sent != received:
                each = seen[sender]
                text = (
                    f"rank {sender} sends {sent} elements to rank {receiver}, which receives "
                    f"{received} from it, in {each.issued} as {_ordinal(place + 1)} collective, in "
                    f"{each.issued.place}"
                )
                return Finding(str(group), text, each.number)
    return None


# --- sends and receives ---


def _unpaired(group: Group, logs: Mapping[int, RankLog], numbered: _ByRank) -> Iterator[Finding]:
    moves: dict[tuple[int, int], dict[str, list[_Numbered]]] = {}
    for rank in group.ranks:
        for each in numbered[rank]:
            if each.issued.is_pair:
                other = group.ranks[each.issued.peer]
                way = (rank, other) if each.issued.op == "send" else (other, rank)
                ends = moves.setdefault(way, {"send": [], "receive": []})
                ends[each.issued.op].append(each)
    for (source, target), ends in moves.items():
        sends, receives = ends["send"], ends["receive"]
        for place in range(max(len(sends), len(receives))):
            if place >= len(sends) or place >= len(receives):
                sender_is_short = place >= len(sends)
                if logs[source if sender_is_short else target].is_whole:
                    yield _lonely(group, place, source, target, sends, receives)
                break
            sent, received = sends[place].issued, receives[place].issued
            if (sent.dtype, sent.sizes, sent.tag) != (received.dtype, received.sizes, received.tag):
                text = (
                    f"rank {source} sends {_message(sent)} to rank {target} as "
                    f"{_ordinal(place + 1)} message in {sent.place}, which receives "
                    f"{_message(received)} in {received.place}"
                )
                yield Finding(str(group), text, sends[place].number)
                break


def _lonely(
    group: Group,
    place: int,
    source: int,
    target: int,
    sends: Sequence[_Numbered],
    receives: Sequence[_Numbered],
) -> Finding:
    each = (sends if place < len(sends) else receives)[place]
    text = (
        f"rank {source} sends {len(sends)} messages to rank {target}, which receives "
        f"{len(receives)} from it; the first without an answer is {_message(each.issued)} in "
        f"{each.issued.place}"
    )
    return Finding(str(group), text, each.number)


def _message(issued: Issued) -> str:
    sizes = " + ".join(map(str, issued.sizes))
    return f"{issued.dtype}[{sizes}]" + (f" with tag {issued.tag}" if issued.tag else "")


# --- orders over several groups ---


def _crossed(groups: Mapping[str, Group], logs: Mapping[int, RankLog]) -> Iterator[Finding]:
    orders: dict[int, list[tuple[tuple[str, int], tuple[int, ...]]]] = {}
    numbers: dict[tuple[int, tuple[str, int]], tuple[int, Issued]] = {}
    for rank, log in logs.items():
        counts: Counter[str] = Counter()
        order = orders.setdefault(rank, [])
        for number, each in enumerate(log.issued):
            if not each.is_pair:
                node = each.group, counts[each.group]
                counts[each.group] += 1
                order.append((node, groups[each.group].ranks))
                numbers[rank, node] = number, each
    for rank, node in _stuck(orders):
        number, each = numbers[rank, node]
        text = (
            f"rank {rank} issues {each} as {_ordinal(node[1] + 1)} collective in {each.place}, but "
            f"another member first one of another group, and so on in a circle"
        )
        yield Finding(str(groups[node[0]]), text, number)


def _stuck(
    orders: Mapping[int, Sequence[tuple[_Node, tuple[int, ...]]]],
) -> list[tuple[int, _Node]]:
    """Ranks that wait for ever, and for what, if each meets the members of its next node before it
    goes on; nothing if all come to their ends."""
    at = dict.fromkeys(orders, 0)
    there: dict[_Node, int] = defaultdict(int)
    ready = list(orders)
    while ready:
        rank = ready.pop()
        if at[rank] == len(orders[rank]):
            continue
        node, members = orders[rank][at[rank]]
        there[node] += 1
        if there[node] == len(members):
            for member in members:
                at[member] += 1
            ready += members
    return [(rank, orders[rank][n][0]) for rank, n in at.items() if n < len(orders[rank])]


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{ending or 'th'}"
