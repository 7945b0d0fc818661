"""Drawings as SVG: one file each, readable on a light and on a dark page, no font to fetch."""

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from titan_moe.verify.report.render import PALETTE

_CARD = {"card": ("#ffffff", "#1b1c21"), "panel": ("#f3f4f6", "#282a31")}
_COLORS = PALETTE | _CARD
Point = tuple[float, float]


class Drawing:
    """Boxes, lines and text on a card of its own, whose colours follow the reader's system.

    Colours are names of the reports' palette, "card" and "panel"; sizes are pixels. `what` is what
    a screen reader says of it.
    """

    def __init__(self, width: int, height: int, what: str) -> None:
        self.width, self.height = width, height
        self._what = what
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "panel",
        edge: str = "grid",
        radius: float = 6,
    ) -> None:
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
            f' rx="{_n(radius)}" style="fill:var(--{fill});stroke:var(--{edge})"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        color: str = "ink",
        anchor: str = "start",
        bold: bool = False,
        code: bool = False,
    ) -> None:
        """One line; `y` is its baseline, `anchor` "start", "middle" or "end"."""
        kind = (
            f' class="code" style="fill:var(--{color})"'
            if code
            else f' style="fill:var(--{color})"'
        )
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" text-anchor="{anchor}"'
            f"{weight}{kind}>{escape(text)}</text>"
        )

    def line(
        self,
        points: Sequence[Point],
        *,
        color: str = "soft",
        width: float = 1.4,
        arrow: bool = False,
        dash: str = "",
    ) -> None:
        """Through the points; an arrow's head is at the last."""
        path = "M" + " L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        more = f' stroke-dasharray="{dash}"' if dash else ""
        head = f' marker-end="url(#{color})"' if arrow else ""
        self._parts.append(
            f'<path d="{path}" fill="none" stroke-width="{_n(width)}"{more}{head}'
            f' style="stroke:var(--{color})"/>'
        )

    def area(self, points: Sequence[Point], *, color: str, opacity: float = 0.35) -> None:
        path = "M" + " L".join(f"{_n(x)} {_n(y)}" for x, y in points) + " Z"
        self._parts.append(f'<path d="{path}" style="fill:var(--{color})" opacity="{opacity}"/>')

    def render(self) -> str:
        """The file's text; the same drawing gives the same bytes."""
        parts = "\n".join(self._parts)
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            f' markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 Z"'
            f' style="fill:var(--{name})"/></marker>'
            for name in _COLORS
            if f"url(#{name})" in parts
        )
        light, dark = (
            "".join(f"--{name}:{pair[scheme]};" for name, pair in _COLORS.items())
            for scheme in (0, 1)
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}"'
            f' width="{self.width}" height="{self.height}" role="img"'
            f" aria-label={quoteattr(self._what)}>\n"
            f"<style>svg{{{light}font-family:system-ui,-apple-system,'Segoe UI',sans-serif}}"
            ".code{font-family:ui-monospace,'Cascadia Mono',Menlo,Consolas,monospace}"
            f"@media (prefers-color-scheme:dark){{svg{{{dark}}}}}</style>\n"
            f"<defs>{heads}</defs>\n"
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8"'
            ' style="fill:var(--card);stroke:var(--grid)"/>\n'
            f"{parts}\n</svg>\n"
        )


def _n(number: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{number:.1f}".removesuffix(".0")
