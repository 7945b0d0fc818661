"""Which checks run in which order, and which ranks act together in each. No torch here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MATMUL, MEMORY, DISK = "matmul", "memory", "disk"
ALONE = (MATMUL, MEMORY, DISK)
"""Each rank on its own; the other checks are an all-reduce."""
PAIRS_OF_RANKS, NODES, PAIRS_OF_NODES = "pairs of ranks", "all ranks of a node", "pairs of nodes"
PAIRS = (PAIRS_OF_RANKS, PAIRS_OF_NODES)

Units = tuple[int, ...]
"""A rank, a node, or a pair of either."""
Groups = dict[Units, list[int]]
"""The ranks that each stands for."""


@dataclass(frozen=True)
class Stage:
    """One check, that groups of ranks make at the same time without sharing a rank."""

    check: str
    groups: Groups
    round: str = ""
    """Such as "2 of 7", where the check needs several stages."""

    @property
    def of_nodes(self) -> bool:
        """Whether its units are nodes; else they are ranks."""
        return self.check in (NODES, PAIRS_OF_NODES)

    @property
    def words(self) -> str:
        kind = self.check if self.check in ALONE else f"all-reduce, {self.check}"
        return f"{kind}, round {self.round}" if self.round else kind

    def group_of(self, rank: int) -> list[int] | None:
        """The ranks of its group; None for a rank that has no part in it."""
        return next((ranks for ranks in self.groups.values() if rank in ranks), None)


def plan(num_nodes: int, ranks_per_node: int) -> list[Stage]:
    """All stages, for ranks that are numbered node by node."""
    nodes = [
        list(range(node * ranks_per_node, (node + 1) * ranks_per_node)) for node in range(num_nodes)
    ]
    alone: Groups = {(rank,): [rank] for node in nodes for rank in node}
    stages = [Stage(check, alone) for check in ALONE]
    # The pairs inside a node, on all nodes at once.
    inside: list[Groups] = [
        {(node[a], node[b]): [node[a], node[b]] for node in nodes for a, b in pairs}
        for pairs in rounds(ranks_per_node)
    ]
    stages += _numbered(PAIRS_OF_RANKS, inside)
    if ranks_per_node > 2:
        stages.append(Stage(NODES, {(number,): node for number, node in enumerate(nodes)}))
    between: list[Groups] = [
        {(a, b): [*nodes[a], *nodes[b]] for a, b in pairs} for pairs in rounds(num_nodes)
    ]
    return stages + _numbered(PAIRS_OF_NODES, between)


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of `count` players, in as few rounds as it goes: everyone plays once in a round,
    and where they are odd in number one pauses (the circle method)."""
    players = list(range(count + count % 2))
    for _ in range(len(players) - 1 if count > 1 else 0):
        pairs = zip(players, reversed(players), strict=True)
        found = sorted({(min(pair), max(pair)) for pair in pairs})
        yield [pair for pair in found if pair[1] < count]
        players = [players[0], players[-1], *players[1:-1]]


def _numbered(check: str, groups: Sequence[Groups]) -> list[Stage]:
    total = len(groups)
    return [
        Stage(check, each, f"{number} of {total}") for number, each in enumerate(groups, start=1)
    ]
