"""HTML pages from templates: one document each, one stylesheet, no network, light and dark."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

PALETTE = {
    "ink": ("#000000", "#e4e4e4"),  # The colour of all that a chart gives none.
    "soft": ("#767676", "#a0a0a0"),
    "grid": ("#dddddd", "#444444"),
    "bad": ("#cc2222", "#ff7b72"),
    "good": ("#118833", "#5fc97e"),
    "warn": ("#a05a00", "#f0b455"),
    "series-1": ("#0072b2", "#5cb8f0"),
    "series-2": ("#d55e00", "#ff9350"),
    "series-3": ("#009e73", "#3fd1a4"),
    "series-4": ("#b5559a", "#e493c8"),
    "series-5": ("#8a6d00", "#d8bb3c"),
    "series-6": ("#3aa0dd", "#9fd8ff"),
    "series-7": ("#5b4bc4", "#a99bff"),
    "series-8": ("#555555", "#bbbbbb"),
    "band": ("#56b4e9", "#3f8fc4"),
}
"""Colours by name, in the light and in the dark scheme; neighbours can be told apart without colour
vision (after Okabe and Ito)."""


@dataclass(frozen=True)
class Table:
    """Heads and rows of a table of text, as the templates' macro `table` takes them."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    kinds: Sequence[str] = ()
    """A class of each row."""


_TEMPLATES = Environment(
    loader=PackageLoader("titan_moe.verify.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, **values: Any) -> str:
    """A page from templates/; every value is escaped unless it is markupsafe.Markup."""
    return _TEMPLATES.get_template(template).render(palette=PALETTE, **values)
