"""Reads fences, code, links and anchors from a Markdown page, for tests of the documentation."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from tests.support.paths import REPO

_FENCE = re.compile(r"^( *)(```+)(\w*)[^`]*$")
_COMMENT = re.compile(r"^\s*<!--\s*(.*?)\s*-->\s*$")


@dataclass(frozen=True)
class Fence:
    """A fenced block of code."""

    line: int
    """Line of the opening fence, counted from 1."""
    language: str
    text: str
    """The block without the fence's indentation."""
    comment: str | None
    """Text of the HTML comment on the line before it."""


def pages() -> list[Path]:
    """README and the like, and every page of docs/."""
    top = [REPO / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
    return top + sorted((REPO / "docs").rglob("*.md"))


def fences(text: str) -> Iterator[Fence]:
    """Every fenced block, in order."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        opening = _FENCE.match(lines[at])
        if not opening:
            at += 1
            continue
        indent, ticks, language = opening.groups()
        body = list(
            takewhile(lambda line, end=indent + ticks: line.rstrip() != end, lines[at + 1 :])
        )
        before = _COMMENT.match(lines[at - 1]) if at else None
        yield Fence(
            at + 1, language, textwrap.dedent("\n".join(body)) + "\n", before[1] if before else None
        )
        at += len(body) + 2


def without_fences(text: str) -> str:
    """The page with empty lines in the place of fenced blocks."""
    lines = text.splitlines()
    for fence in fences(text):
        count = fence.text.count("\n") + 1
        lines[fence.line - 1 : fence.line + count] = [""] * (count + 1)
    return "\n".join(lines)


def code_spans(text: str) -> Iterator[tuple[int, str]]:
    """Every `code` in the prose: line and text."""
    for number, line in enumerate(without_fences(text).splitlines(), 1):
        for _, code in re.findall(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", line):
            yield number, code


def links(text: str) -> Iterator[tuple[int, str]]:
    """Every target of a link or picture in the prose: line and target."""
    for number, line in enumerate(without_fences(text).splitlines(), 1):
        prose = re.sub(r"`[^`]*`", "", line)
        for target in re.findall(r"\]\(([^)\s]+)[^)]*\)|(?:href|src|srcset)=\"([^\"]+)\"", prose):
            yield number, target[0] or target[1]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings, and those that the page names itself."""
    found = set(re.findall(r"(?:id|name)=\"([^\"]+)\"", text))
    for line in without_fences(text).splitlines():
        if heading := re.match(r"#{1,6}\s+(.*?)\s*(?:\{\s*#([^\s}]+).*\})?\s*$", line):
            words = re.sub(r"[^\w\- ]", "", heading[1].lower())
            found |= {words.replace(" ", "-"), *filter(None, [heading[2]])}
    return found
