"""The tables and pictures of docs/museum.md, of what `python -m scripts.museum` found."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.planting import Bug, planted_bugs

STEPS = 100
RESULTS = Path(__file__).with_name("results.json")
HALLS = ("divisors and sums", "norms", "routing and balance", "optimizer", "lost gradients")
FIGURES = {hall: f"figures/museum-{hall.replace(' ', '-')}.svg" for hall in HALLS}
_HEADS = "mistake", "loss", "seen", "norm", "seen", "gate", "localizer"


def exhibits() -> dict[str, Bug]:
    """Returns the planted mistakes that other projects had, by name, hall after hall."""
    bugs = {name: bug for name, bug in planted_bugs().items() if bug.museum}
    return dict(sorted(bugs.items(), key=lambda each: HALLS.index(each[1].hall)))


def tables() -> str:
    """Returns a section of each hall: its picture and its table."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    parts = []
    for hall in HALLS:
        title = hall.capitalize()
        picture = f"![Loss and gradient norm with mistakes: {hall}]({FIGURES[hall]})"
        rows = [_row(n, b, found["bugs"][n]) for n, b in exhibits().items() if b.hall == hall]
        parts.append(
            "\n".join(
                [f"## {title}\n\n{picture}\n{_line(_HEADS)}\n{_line(['---'] * len(_HEADS))}", *rows]
            )
        )
    return "\n\n".join([*parts, f"Made on {found['date']}, on a CPU."])


def _row(name: str, bug: Bug, found: Mapping[str, Any]) -> str:
    threads = [thread.split("#") for thread in bug.museum]
    links = ", ".join(
        f"[{owner}#{number}](https://github.com/{owner}/issues/{number})"
        for owner, number in threads
    )
    loss, norm = (
        f"{_seen(found['seeds'][n])}; of orders: {_seen(found['orders'][n])}" for n in (0, 1)
    )
    said = found["gate"][0].replace("|", "\\|") if found["gate"] else "passes"
    place = " ".join(filter(None, found["localizer"] or ["nothing"]))
    cells = [
        f"**{name}**: {bug.story} {links}. Here: `{bug.where}`, {bug.kind}, `{bug.caught_on}`",
        f"{found['loss']:+.2%}",
        loss,
        f"{found['norm']:.3g}",
        norm,
        said,
        place,
    ]
    return _line(cells)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _seen(step: int | None) -> str:
    return "never" if step is None else f"step {step}"


def picture_of(hall: str, runs: Sequence[Any], bands: Mapping[str, Any]) -> str:
    """Returns an SVG file of two charts, loss and gradient norm, in both colour schemes."""
    # Imported here: drawing takes matplotlib, and a table does not.
    from titan_moe.verify.report.plots import charts, draw_curves
    from titan_moe.verify.report.render import PALETTE

    panels = {
        f"{quantity}, {hall}": partial(draw_curves, runs=runs, quantity=quantity, band=band)
        for quantity, band in bands.items()
    }
    places = [f'<svg x="{10 + 470 * n}" y="8" width="460" ' for n in range(len(panels))]
    drawn = charts(panels).values()
    inside = "".join(
        svg.replace("<svg ", place, 1) for place, svg in zip(places, drawn, strict=True)
    )
    light, dark = (
        "".join(f"--{name}:{both[n]};" for name, both in PALETTE.items()) for n in (0, 1)
    )
    scheme = f"@media (prefers-color-scheme:dark){{svg{{{dark}--card:#1b1c21}}}}"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 950 246" role="img" aria-label="{hall}">'
        f"<style>svg{{{light}--card:#ffffff;fill:var(--ink)}}{scheme}</style>"
        '<rect width="950" height="246" rx="8" style="fill:var(--card)"/>'
        f"{inside}</svg>\n"
    )
