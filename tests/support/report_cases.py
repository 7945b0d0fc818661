"""A page as its parts, and the facts of a layout."""

from html.parser import HTMLParser
from typing import Any

from titan_moe.distributed.parallel_dims import ParallelDims

_VOID = {"meta", "img", "br", "input"}


class Page(HTMLParser):
    """The text of each section, tables by section, and what a page would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {"": ""}
        self.tables: dict[str, list[list[str]]] = {}
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        if tag not in _VOID:
            self.open.append((tag, known))
        if known.get("id"):
            self.ids.append(str(known["id"]))
        for key in ("src", "href", "xlink:href", "srcset", "action"):
            if known.get(key):
                self.loads.append(str(known[key]))
        if tag == "tr":
            self.tables.setdefault(self.section, []).append([])
        if tag in ("td", "th"):
            self.tables[self.section][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID:
            return
        while self.open[-1][0] != tag:
            # Only these may be left open.
            assert self.open[-1][0] == "p", (self.open, tag)
            self.open.pop()
        self.open.pop()

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self.open]
        if "style" in tags or "script" in tags:
            return
        self.text[self.section] = self.text.get(self.section, "") + data
        if "td" in tags or "th" in tags:
            self.tables[self.section][-1][-1] += data

    @property
    def section(self) -> str:
        ids = [str(known.get("id")) for tag, known in self.open if tag == "section"]
        return ids[-1] if ids else ""


def facts(**degrees: int) -> dict[str, Any]:
    """run.json of a layout."""
    world = degrees.pop("world_size")
    dims = ParallelDims(world_size=world, **degrees)
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "edp", "ep", "etp")
    return {"world_size": world, "layout": {axis: dims.size(axis) for axis in axes}}
