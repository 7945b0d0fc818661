"""The tables and pictures of docs/museum.md, of what `python -m scripts.museum` found."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.exhibits import HALLS, STEPS, exhibits
from tests.support.planting import Bug

RESULTS = Path(__file__).with_name("results.json")
FIGURES = {hall: f"figures/museum-{hall.replace(' ', '-')}.svg" for hall in HALLS}
_HEADS = "mistake", "loss", "seen", "norm", "seen", "gate", "localizer"


def tables() -> str:
    """Returns a section of each hall: its picture and its table."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    seen = [[*of["seeds"], any(of["orders"]), of["gate"]] for of in found["bugs"].values()]
    loss, norm, compared, gate = (sum(map(bool, column)) for column in zip(*seen, strict=True))
    eye = f"an eye sees {loss} in the loss and {norm} in the gradient norm of {STEPS} steps"
    rest = f"`verify losses` {compared}, the gate {gate}. {found['date']}, on a CPU."
    lines = [f"Of {len(seen)} mistakes, {eye}, {rest}", ""]
    for hall in HALLS:
        picture = f"![Loss and gradient norm with mistakes: {hall}]({FIGURES[hall]})"
        lines += [f"## {hall.capitalize()}", "", picture, "", _line(_HEADS)]
        lines.append(_line("---" for _ in _HEADS))
        lines += [_row(n, b, found["bugs"][n]) for n, b in exhibits().items() if b.hall == hall]
        lines.append("")
    return "\n".join(lines)


def _row(name: str, bug: Bug, found: Mapping[str, Any]) -> str:
    links = [
        f"[{thread}](https://github.com/{thread.replace('#', '/issues/')})" for thread in bug.museum
    ]
    seen = [
        " / ".join("never" if steps is None else f"{steps}" for steps in pair)
        for pair in zip(found["seeds"], found["orders"], strict=True)
    ]
    said = found["gate"][0].split(": ", 2)[-1] if found["gate"] else "passes"
    place = " ".join(filter(None, found["localizer"] or ["nothing"]))
    story = f"**{name}**: {bug.story} {', '.join(links)}"
    return _line(
        [story, f"{found['loss']:+.2%}", seen[0], f"{found['norm']:.3g}", seen[1], said, place]
    )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def picture(hall: str, runs: Sequence[Any], band: Any) -> str:
    """Returns an SVG file of two charts, loss and gradient norm, over the band of seeds."""
    # Imported here: drawing takes matplotlib, and a table does not.
    from titan_moe.verify.report.plots import charts, draw_curves
    from titan_moe.verify.report.render import PALETTE

    panels = {
        f"{quantity}, {hall}": partial(draw_curves, runs=runs, quantity=quantity, band=band)
        for quantity in band.quantities
    }
    inside = "".join(
        str(svg).replace("<svg ", f'<svg x="{10 + 470 * n}" y="8" width="460" height="234" ', 1)
        for n, svg in enumerate(charts(panels).values())
    )
    inside = re.sub(r"(\d\.\d)\d+", r"\1", inside)
    inside = re.sub(r"var\(--([\w-]+)\)", lambda name: PALETTE[name[1]][0], inside)
    head = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    card = '<rect width="950" height="250" rx="8" fill="#ffffff"/>'
    return f'<svg {head} viewBox="0 0 950 250">{card}{inside}</svg>\n'
