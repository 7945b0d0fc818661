"""The tables of titan_moe beside torchtitan and transformers' Trainer on the CPU.

From docs/results/torchtitan.json, which scripts.bench.torchtitan.compare writes.
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "torchtitan.json"
_HEAD = (
    "| | rounds | tokens/s, ours : theirs | ratio (goal) | of the matmul rate | "
    "memory, ours : theirs | ratio (goal) | needed | growth after step 6, ours : theirs (goal) | "
    "first step, ours : theirs |"
    "\n|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)
_TRAINER_HEAD = (
    "| | tokens/s, ours : the Trainer's | ratio | memory, ours : the Trainer's | ratio |\n"
    "|---|--:|--:|--:|--:|"
)


def tables() -> str:
    """Both tables, and what they were measured by; a line where nothing has been measured."""
    if not RESULTS.is_file():
        return "Not measured with these goals yet."
    return tables_of(json.loads(RESULTS.read_text(encoding="utf-8")))


def tables_of(found: dict[str, Any]) -> str:
    """Of the figures in the file."""
    commit = str(found["code"].get("commit", "no commit"))[:7]
    facts = f"`{found['command']}`, {found['date']}, {commit}, torch {found['torch']}."
    rows = [(row["name"], len(row["starts"]), row["figures"]) for row in found["rows"]]
    with_trainer = [_trainer_row(name, each) for name, _, each in rows if "trainer" in each]
    text = "\n".join([facts, "", _HEAD, *(_row(*row) for row in rows)])
    if with_trainer:
        text += "\n".join(["\n\nBeside the Trainer:\n", _TRAINER_HEAD, *with_trainer])
    return text


def _row(name: str, rounds: int, figures: dict[str, Any]) -> str:
    ours, theirs, goals = figures["ours"], figures["theirs"], figures["goals"]
    growth = goals["growth"]
    cells = [
        name,
        f"{rounds}",
        f"{ours['rate']:,.0f} : {theirs['rate']:,.0f}",
        _ratio(goals["tokens/s"]),
        _percent(figures["of_matmul"]),
        f"{ours['memory_mib']:,.0f} : {theirs['memory_mib']:,.0f}",
        _ratio(goals["memory"]),
        f"{figures['needed_mib'] / theirs['memory_mib']:.2f}",
        f"{_bold(_percent(growth['figure']), growth['met'])} : {_percent(theirs['growth'])} "
        f"({_percent(growth['bound'])})",
        f"{ours['first_step']:.1f} : {theirs['first_step']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def _trainer_row(name: str, figures: dict[str, Any]) -> str:
    ours, theirs = figures["ours"], figures["trainer"]
    cells = [
        name,
        f"{ours['rate']:,.0f} : {theirs['rate']:,.0f}",
        f"{ours['rate'] / theirs['rate']:.2f}",
        f"{ours['memory_mib']:,.0f} : {theirs['memory_mib']:,.0f}",
        f"{ours['memory_mib'] / theirs['memory_mib']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _ratio(goal: dict[str, Any]) -> str:
    """What misses its goal is in bold."""
    return f"{_bold(format(goal['figure'], '.2f'), goal['met'])} ({goal['bound']:.2f})"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _bold(text: str, met: bool) -> str:
    return text if met else f"**{text}**"
