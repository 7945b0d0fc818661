"""A list of comparisons as one page: how each ended, and where its own page is."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from titan_moe.verify.report.style import document

_STYLE = """
td.word { font-weight: 600; white-space: nowrap }
.total { font-size: 1.05rem; margin-bottom: 1rem }
td { vertical-align: top; overflow-wrap: anywhere }
"""


@dataclass(frozen=True)
class SuiteRow:
    """One comparison of a job."""

    name: str
    expected: str
    """The verdict that was asked for, in words."""
    verdict: str
    """The one that was found, in words; what happened where there is none."""
    ok: bool
    detail: str
    """The first difference, or the reason of a failure; may have several lines."""
    seconds: float
    href: str = ""
    """Its own page, relative to this one; empty where there is none."""


def suite_page(title: str, rows: Sequence[SuiteRow]) -> str:
    """Totals on top, then a row for each comparison, those that are not as expected first."""
    ordered = sorted(rows, key=lambda row: row.ok)
    good = sum(row.ok for row in rows)
    seconds = sum(row.seconds for row in rows)
    kind = "passed" if good == len(rows) else "failed"
    total = f"{good} of {len(rows)} comparisons are as expected; {_duration(seconds)}."
    heads = ("", "comparison", "verdict", "expected", "detail", "seconds")
    head = "".join(f"<th{' class=n' if name == 'seconds' else ''}>{name}</th>" for name in heads)
    body = "".join(map(_row, ordered))
    return document(
        title,
        f'<h1>{escape(title)}</h1><p class="total {kind}">{escape(total)}</p>'
        f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>",
        style=_STYLE,
    )


def _row(row: SuiteRow) -> str:
    kind, word = ("passed", "as expected") if row.ok else ("failed", "NOT as expected")
    name = escape(row.name)
    if row.href:
        name = f'<a href="{escape(row.href, quote=True)}">{name}</a>'
    lines = "<br>".join(escape(line) for line in row.detail.splitlines())
    return (
        f'<tr><td class="word {kind}">{word}</td><td>{name}</td><td>{escape(row.verdict)}</td>'
        f"<td>{escape(row.expected)}</td><td>{lines}</td><td class=n>{row.seconds:.1f}</td></tr>"
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
