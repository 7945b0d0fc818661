"""What all HTML pages have in common: one document without network, light and dark."""

from collections.abc import Iterable, Sequence
from html import escape

PALETTE = {
    "ink": ("#222222", "#e4e4e4"),
    "soft": ("#767676", "#a0a0a0"),
    "grid": ("#dddddd", "#444444"),
    "bad": ("#cc2222", "#ff7b72"),
    "good": ("#118833", "#5fc97e"),
    "warn": ("#a05a00", "#f0b455"),
    "one": ("#0072b2", "#5cb8f0"),
    "two": ("#d55e00", "#ff9350"),
    "three": ("#009e73", "#3fd1a4"),
    "four": ("#b5559a", "#e493c8"),
    "five": ("#8a6d00", "#d8bb3c"),
    "six": ("#3aa0dd", "#9fd8ff"),
    "seven": ("#5b4bc4", "#a99bff"),
    "eight": ("#555555", "#bbbbbb"),
    "band": ("#56b4e9", "#3f8fc4"),
}
"""Colours by name, in the light and in the dark scheme; colour-blind readers tell neighbours apart
(after Okabe and Ito)."""


def _variables(scheme: int) -> str:
    return " ".join(f"--{name}: {colors[scheme]};" for name, colors in PALETTE.items())


STYLE = (
    f"""
:root {{ color-scheme: light dark; --line: #8884; --panel: #8881; {_variables(0)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}
"""
    + """
body { font: 13px/1.4 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem }
h1 { font-size: 1.3rem; margin: 0 0 .5rem; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2rem 0 .4rem } h3 { font-size: 1rem; margin: 1rem 0 .3rem }
p { margin: .3rem 0 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .2rem .4rem; border-bottom: 1px solid var(--line) }
th { vertical-align: bottom }
td.n, th.n { text-align: right; white-space: nowrap }
.wide { overflow-x: auto }
.passed { color: var(--good) } .failed, .refused { color: var(--bad); font-weight: 600 }
"""
)


def document(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """A whole page: `body` and what follows are HTML, `title` is text."""
    scripts = f"<script>{script}</script>" if script else ""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8>"
        f"<meta name=viewport content='width=device-width'>"
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style>"
        f"{body}{scripts}</html>\n"
    )


def section(name: str, title: str, body: str) -> str:
    """A part of a page that links can name."""
    return f'<section id="{name}"><h2>{escape(title)}</h2>{body}</section>\n'


def folded(title: str, body: str, *, is_open: bool = False) -> str:
    """What is seen on a click."""
    state = " open" if is_open else ""
    return f"<details{state}><summary>{escape(title)}</summary>{body}</details>"


def paragraph(text: str, kind: str = "") -> str:
    """A line of text."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Iterable[int] = (),
    kinds: Sequence[str] = (),
) -> str:
    """Rows of text; columns in `numbers` stand right; `kinds` are the rows' classes."""
    right = set(numbers)

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if column in right else ''}>{escape(text)}</{tag}>"
            for column, text in enumerate(texts)
        )

    body = "".join(
        f"<tr{f' class={kinds[i]}' if kinds and kinds[i] else ''}>{cells('td', row)}</tr>"
        for i, row in enumerate(rows)
    )
    return (
        f"<div class=wide><table><thead><tr>{cells('th', heads)}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
