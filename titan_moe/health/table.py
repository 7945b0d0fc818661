"""What all ranks measured, as lines of text."""

from collections.abc import Mapping, Sequence
from statistics import median

from titan_moe.debug.hang.analysis import numbers
from titan_moe.health.plan import ALONE
from titan_moe.health.verdict import Outcome, Rank

_COLUMNS = ("matmul", "memory", "write", "read")
_LEFT = 3
"""Columns of words."""


def table(ranks: Sequence[Rank], checks: Mapping[str, Outcome]) -> list[str]:
    """A line for each rank, then one for each kind of all-reduce."""
    rates = {name: each for outcome in checks.values() for name, each in outcome.rates.items()}
    rows = [["rank", "host", "device", *_COLUMNS]]
    for number, rank in enumerate(ranks):
        device = rank.kind if rank.gpu is None else f"GPU {rank.gpu}, {rank.kind}"
        values = (rates.get(name, {}).get((number,)) for name in _COLUMNS)
        found = [_rate(name, each) for name, each in zip(_COLUMNS, values, strict=True)]
        rows.append([str(number), rank.host, device, *found])
    lines = _aligned(rows, left=_LEFT)
    rows = [["all-reduce", "slowest", "rate", "median"]]
    for check, outcome in checks.items():
        of_check = outcome.rates.get("all-reduce")
        if check not in ALONE and of_check:
            slowest = min(of_check, key=lambda units: of_check[units])
            found = [_rate("", of_check[slowest]), _rate("", median(of_check.values()))]
            rows.append([check, numbers(slowest), *found])
    return [*lines, "", *_aligned(rows, left=2)] if len(rows) > 1 else lines


def _rate(name: str, rate: float | None) -> str:
    if rate is None:
        return "-"
    if name != "matmul":
        return f"{rate / 1e9:,.2f} GB/s"
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate > 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"


def _aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """`left`: the columns, from the first on, that are not numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if number < left else text.rjust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
