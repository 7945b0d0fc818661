"""Generates parts of docs/, and finds those that are out of date."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.docs import commands, configuration, forms, models, published, torchtitan

REGIONS: dict[str, Callable[[], str | None]] = {
    "commands": commands.sections,
    "configuration": configuration.tables,
    "forms": forms.table,
    "models": models.tables,
    "published": published.table,
    "torchtitan": torchtitan.table,
    "torchtitan metrics": torchtitan.metrics,
}
"""The text of a region, by its name in the page; None leaves it as it is."""
_REGION = re.compile(r"(<!-- generated: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def outdated(docs: Path) -> dict[Path, str]:
    """The files below `docs` that are not as generated, and the text that they should have."""
    made: dict[str, str | None] = {}
    found = {}
    for path in sorted(docs.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if (new := filled(text, REGIONS, made)) != text:
            found[path] = new
    return found


def filled(
    text: str, regions: Mapping[str, Callable[[], str | None]], made: dict[str, str | None]
) -> str:
    """A page with its regions written anew; `made` keeps what has been generated.

    KeyError names a region that nothing generates; ValueError: a region has no end.
    """
    if text.count("<!-- generated: ") != len(_REGION.findall(text)):
        raise ValueError("a '<!-- generated: NAME -->' without an end")

    def replace(region: re.Match[str]) -> str:
        opening, name, _, end = region.groups()
        if name not in made:
            made[name] = regions[name]()
        new = made[name]
        return region[0] if new is None else f"{opening}\n{new.strip(chr(10))}\n\n{end}"

    return _REGION.sub(replace, text)
