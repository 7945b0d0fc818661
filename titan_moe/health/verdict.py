"""Which rank, node or pair is slow or wrong: lines of words from what all ranks found.

Pure functions of their results. What is wrong, or has not ended, is always named; slow is what
falls short of the others: of the ranks with the same device, or of the other pairs. A rank or a
node that is bad with each other one is named instead of all its pairs. No torch here.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from titan_moe.debug.hang.analysis import numbers
from titan_moe.health.plan import ALONE, DISK, MATMUL, MEMORY, PAIRS, PAIRS_OF_NODES, Stage, Units

GPU_SHARE, CPU_SHARE, DISK_SHARE = 0.8, 0.4, 0.25
"""Less than this of the others is slow. Processes share CPUs and disks, and their rates differ by
themselves: by how much on a busy machine, docs/benchmarks.md says."""
_QUANTITIES = {"matmul": "matmul", "memory": "memory copies", "write": "writing to the disk"}
_MOST_LINES = 12


@dataclass(frozen=True)
class Rank:
    """Where a rank is, and on what."""

    node: int
    host: str
    gpu: int | None
    kind: str
    """The device's name: only alike ones are compared."""


Found = Mapping[int, Mapping[str, Any]]
"""The fields of `probes.Result`, by rank; a rank is missing that had not ended in time."""


@dataclass
class Outcome:
    """One check, all its stages together."""

    of_nodes: bool
    groups: list[Units] = field(default_factory=list)
    rates: dict[str, dict[Units, float]] = field(default_factory=dict)
    """By quantity and group. A group is as fast as its slowest rank."""
    problems: dict[Units, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Judge:
    """`slow`: the share below which a rate is slow; None: that of the device or of disks."""

    ranks: Sequence[Rank]
    timeout_s: int
    slow: float | None

    def lines(self, stages: Sequence[Stage], found: Sequence[Found]) -> list[str]:
        """A line for whatever is bad; `found`: of the stages that ran, in their order."""
        lines = []
        for stage, results in zip(stages, found, strict=False):
            lines += self._unfinished(stage, results)
        for check, outcome in outcomes(stages, found).items():
            lines += self._wrong(check, outcome)
            for quantity, rates in outcome.rates.items():
                lines += self._slow(check, quantity, rates, outcome.of_nodes)
        if len(lines) > _MOST_LINES:
            lines = [*lines[:_MOST_LINES], f"and {len(lines) - _MOST_LINES} more"]
        return lines

    def _unfinished(self, stage: Stage, results: Found) -> list[str]:
        return [
            f"{self._words(units, stage.of_nodes)}: {_subject(stage.check, units)} had not ended "
            f"after {self.timeout_s} s"
            for units, ranks in stage.groups.items()
            if not results.keys() >= set(ranks)
        ]

    def _wrong(self, check: str, outcome: Outcome) -> list[str]:
        if check in ALONE:
            alike: defaultdict[str, list[int]] = defaultdict(list)
            for units, problem in outcome.problems.items():
                alike[problem] += units
            return [f"{self._together(alike[text])}: {check}: {text}" for text in alike]
        lines = []
        for units in _culprits(outcome.problems, outcome.groups):
            text = next(outcome.problems[g] for g in outcome.problems if {*units} <= {*g})
            words = self._words(units, outcome.of_nodes)
            lines.append(f"{words}: {_subject(check, units)}: {text}")
        return lines

    def _slow(
        self, check: str, quantity: str, rates: Mapping[Units, float], of_nodes: bool
    ) -> list[str]:
        if quantity == "read":  # The page cache may have answered.
            return []
        of_device = CPU_SHARE if self.ranks[0].gpu is None else GPU_SHARE
        share = self.slow or (DISK_SHARE if check == DISK else of_device)
        ratios = _of_typical(rates) if len(next(iter(rates))) > 1 else self._of_others(check, rates)
        slow = {units for units, ratio in ratios.items() if ratio < share}
        lines = []
        for units in _culprits(slow, rates):
            ratio = median(ratios[group] for group in slow if {*units} <= {*group})
            what = _QUANTITIES.get(quantity) or _subject(check, units)
            words = self._words(units, of_nodes)
            lines.append(f"{words}: {what} at {100 * ratio:.0f} % of the others")
        return lines

    def _of_others(self, check: str, rates: Mapping[Units, float]) -> dict[Units, float]:
        """Each rate over the median of the others', of alike devices."""
        kinds = {
            units: self.ranks[units[0]].kind if check in (MATMUL, MEMORY) else "" for units in rates
        }
        found = {}
        for units, rate in rates.items():
            others = [rates[u] for u in rates if u != units and kinds[u] == kinds[units]]
            if others:
                found[units] = rate / median(others)
        return found

    def _words(self, units: Units, of_nodes: bool) -> str:
        if of_nodes:
            hosts = {rank.node: rank.host for rank in self.ranks}
            return " and ".join(f"node {unit} (host {hosts[unit]})" for unit in units)
        return " and ".join(self._together([unit]) for unit in units)

    def _together(self, ranks: Sequence[int]) -> str:
        hosts = list(dict.fromkeys(self.ranks[rank].host for rank in ranks))
        gpu = self.ranks[ranks[0]].gpu
        if len(ranks) == 1:
            return f"rank {ranks[0]} (host {hosts[0]}{'' if gpu is None else f', GPU {gpu}'})"
        return f"ranks {numbers(ranks)} (host {', '.join(hosts)})"


def outcomes(stages: Sequence[Stage], found: Sequence[Found]) -> dict[str, Outcome]:
    """What the groups of each check found, over all its stages."""
    checks: dict[str, Outcome] = {}
    for stage, results in zip(stages, found, strict=False):
        outcome = checks.setdefault(stage.check, Outcome(stage.of_nodes))
        for units, ranks in stage.groups.items():
            outcome.groups.append(units)
            present = [results[rank] for rank in ranks if rank in results]
            for problem in [each["problem"] for each in present if each["problem"]][:1]:
                outcome.problems[units] = problem
            for quantity in {name for each in present for name in each["rates"]}:
                rates = [each["rates"][quantity] for each in present if quantity in each["rates"]]
                outcome.rates.setdefault(quantity, {})[units] = min(rates)
    return checks


def _of_typical(rates: Mapping[Units, float]) -> dict[Units, float]:
    """Each pair's rate over that of a typical unit in its best pair: a unit that is slow in all of
    its pairs, most of all where there are three, must not set the measure."""
    units = {unit for pair in rates for unit in pair}
    typical = median(max(rates[pair] for pair in rates if unit in pair) for unit in units)
    return {pair: rate / typical for pair, rate in rates.items()}


def _culprits(bad: Collection[Units], groups: Collection[Units]) -> list[Units]:
    """The units that are bad in all of their several pairs, then the bad groups without them."""
    units = {unit for group in groups for unit in group}
    own = {unit: [group for group in groups if unit in group] for unit in units}
    always = {unit for unit, each in own.items() if len(each) > 1 and {*each} <= {*bad}}
    if always == units:
        always = set()
    return [*((unit,) for unit in sorted(always)), *(g for g in sorted(bad) if not always & {*g})]


def _subject(check: str, units: Units) -> str:
    """What is bad of a group, or of a unit in all of its pairs."""
    if check in ALONE:
        return check
    if len(units) > 1:
        return "all-reduce"
    if check in PAIRS:
        return "all-reduce with each other " + ("node" if check == PAIRS_OF_NODES else "rank")
    return "all-reduce of its ranks"
