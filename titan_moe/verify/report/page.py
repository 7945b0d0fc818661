"""A comparison of two runs as one self-contained HTML page."""

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from titan_moe.verify.compare.comparison import Comparison, Verdict
from titan_moe.verify.compare.records import LOAD_OF, NORM_OF
from titan_moe.verify.report.charts import (
    draw_curves,
    draw_difference,
    draw_standing,
    legend,
    pair_lines,
    svg,
)
from titan_moe.verify.report.data import Deviation, common_steps, deviations, relative_difference
from titan_moe.verify.report.heat import LOAD, difference_of, ends, grid, heat_of, load_maps, scale
from titan_moe.verify.report.sections import (
    configurations,
    environments,
    layouts,
    loud,
    report,
    values_table,
)
from titan_moe.verify.report.style import folded, paragraph, table
from titan_moe.verify.report.words import (
    ABSENT,
    all_notes,
    detail,
    labelled,
    layout_words,
    number,
    relative_words,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from titan_moe.verify.compare.routing_diff import Flips

    Draw = Callable[[Figure], None]

KINDS = {
    Verdict.IDENTICAL: "right",
    Verdict.INSIDE: "right",
    Verdict.DIFFERENT: "wrong",
    Verdict.UNJUDGED: "open",
}
_MOST_ROWS, _MOST_FOLDED = 20, 1000
"""Rows that are seen, and that are seen on a click."""


def comparison_page(comparison: Comparison) -> str:
    """Verdict, curves, expert load, routing, norms, layouts, configuration, environment, band."""
    comparison = labelled(comparison)
    pair = comparison.baseline, comparison.candidate
    sections = [
        ("curves", "Curves", _curves(comparison)),
        ("load", "Expert load", _load(comparison)),
    ]
    if comparison.flips is not None or comparison.replayed is not None:
        sections.append(("routing", "Routing", _routing(comparison)))
    sections += [
        ("quantities", "What differs most", _quantities(comparison)),
        ("layouts", "Layouts", layouts(pair)),
        ("configuration", "Configuration", configurations(pair)),
        ("environment", "Environment", environments(pair)),
        ("band", "Noise band", _band(comparison)),
    ]
    return report(comparison.title, _top(comparison), sections)


def _top(comparison: Comparison) -> str:
    verdict = comparison.verdict.value
    baseline, candidate = comparison.baseline, comparison.candidate
    sides = "; ".join(
        f"{run.name} ({layout_words(run)}, steps {run.curve.steps[0]} to {run.curve.steps[-1]})"
        for run in (baseline, candidate)
    )
    missing = all_notes((baseline, candidate))
    if comparison.judgement is not None and (lacking := comparison.judgement.missing):
        few = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
        missing.append(f"judged without {len(lacking)} quantities that the repeats have: {few}")
    replayed = ""
    if comparison.replayed is not None:
        said = f"With the baseline's routing: {comparison.replayed.verdict.value}."
        replayed = paragraph(f"{said} {detail(comparison.replayed)}")
    return (
        f'<div class="top {KINDS[comparison.verdict]}" id=verdict>'
        f"<h2>{escape(verdict[0].upper() + verdict[1:])}</h2>"
        f"{paragraph(detail(comparison))}{replayed}</div>"
        f"{paragraph(f'Sides: {sides}.')}"
        f"{loud('Caveats', comparison.caveats)}"
        f"{loud('What is missing', missing)}"
    )


def _curves(comparison: Comparison) -> str:
    first = comparison.first.step if comparison.first else None
    found = ""
    for quantity in ("loss", "grad_norm"):
        found += _chart(f"{quantity}, both runs", _overlay(comparison, quantity, first))
        found += _chart(f"{quantity}, difference on a log scale", _difference(comparison, quantity))
    others = [
        key
        for key in comparison.baseline.curve.scalars
        if key not in ("loss", "grad_norm")
        and not key.startswith((NORM_OF, "moe/"))
        and key in comparison.candidate.curve.scalars
    ]
    more = "".join(_chart(key, _overlay(comparison, key, first)) for key in others)
    if more:
        more = folded(f"More curves: {', '.join(others)}", f"<div class=charts>{more}</div>")
    return f"<div class=charts>{found}</div>{more}{_values(comparison)}"


def _chart(what: str, draw: "Draw", height: float = 3.4) -> str:
    return f"<div>{svg(what, what, draw, height=height)}</div>"


def _overlay(comparison: Comparison, quantity: str, first: int | None) -> "Draw":
    def draw(figure: "Figure") -> None:
        lines = pair_lines(comparison, quantity)
        draw_curves(figure.subplots(), quantity, lines, band=comparison.band, first=first)
        legend(figure, columns=2)

    return draw


def _difference(comparison: Comparison, quantity: str) -> "Draw":
    def draw(figure: "Figure") -> None:
        draw_difference(figure.subplots(), quantity, comparison)
        legend(figure, columns=2)

    return draw


def _values(comparison: Comparison) -> str:
    first, second = comparison.baseline.curve, comparison.candidate.curve
    common = common_steps(first, second)
    keys = [k for k in ("loss", "grad_norm") if k in first.scalars and k in second.scalars]
    heads = ["step"]
    columns = [[str(step) for step in common.steps]]
    for key in keys:
        ours, theirs = first.scalars[key][common.first], second.scalars[key][common.second]
        heads += [f"{key}, baseline", "candidate", "relative difference"]
        columns += [[number(v) for v in ours], [number(v) for v in theirs]]
        columns.append([relative_words(v) for v in relative_difference(ours, theirs)])
    return values_table(heads, list(zip(*columns, strict=True)))


def _load(comparison: Comparison) -> str:
    baseline, candidate = comparison.baseline, comparison.candidate
    heats = [heat_of(baseline), heat_of(candidate)]
    difference = difference_of(baseline, candidate)
    every = [*difference.busiest.values(), *difference.loads.values()]
    if every and all((values == 0).all() for values in every):
        return paragraph("The same in all layers and steps.") + load_maps(heats[:1])
    return load_maps(heats, difference)


def _routing(comparison: Comparison) -> str:
    flips = "" if comparison.flips is None else _flips(comparison.flips)
    return flips + (_replayed(comparison.replayed) if comparison.replayed is not None else "")


def _flips(flips: "Flips") -> str:
    """A map of layers over steps, and the sums of each layer."""
    share_SL = np.asarray(flips.share_SL, dtype=float)
    found = paragraph(flips.line())
    top = float(np.nanmax(share_SL, initial=0.0))
    if top > 0:
        head = "share of chosen experts that differ, layer by layer"
        found += scale(LOAD, "0", f"{top:.2%}")
        found += grid([head], [(ends(flips.layers), [(flips.steps, share_SL.T, LOAD, top)])])
    flipped, slots = flips.flipped_SL.sum(0), flips.slots_SL.sum(0)
    rows = [
        [layer, f"{flipped[i]:,}", f"{slots[i]:,}", f"{flipped[i] / max(slots[i], 1):.4%}"]
        for i, layer in enumerate(flips.layers)
    ]
    heads = ["layer", "flipped", "of chosen experts", "share"]
    if flips.drift_SL is not None:
        heads.append("relative difference of the other weights")
        for i, row in enumerate(rows):
            row.append(relative_words(float(flips.drift_SL[:, i].mean())))
    by_layer = table(heads, rows, numbers=range(1, len(heads)))
    return found + folded(f"Flips by layer: {len(rows)}", by_layer)


def _replayed(replayed: Comparison) -> str:
    """What is left when the candidate routes as the baseline did is numeric drift alone."""
    said = f"With the baseline's routing: {replayed.verdict.value}. {detail(replayed)}"
    charts = "".join(
        _chart(f"{quantity}, difference with replayed routing", _difference(replayed, quantity))
        for quantity in ("loss", "grad_norm")
    )
    return f"{paragraph(said)}{loud('Caveats', replayed.caveats)}<div class=charts>{charts}</div>"


def _quantities(comparison: Comparison) -> str:
    """Every quantity at its worst step, the worst first; parameters' norms below in their own."""
    every = deviations(comparison)
    if not every:
        return paragraph("No step, or no quantity, that both runs logged.")
    norms = [one for one in every if one.quantity.startswith(NORM_OF)]
    found = paragraph(
        "Each quantity at the step where it is furthest out. "
        + (
            "Reach: distance from the band's middle in half widths of the band, each step alone; "
            "above 1 is outside."
            if comparison.band is not None
            else "Sorted by relative difference, as there is no band."
        )
        + " Of a load, the relative difference is the share of rows that went to other experts; "
        "a parameter's norm below 1e-4 of the total norm counts as that much."
    )
    found += _deviations([one for one in every if one not in norms])
    if norms:
        return f"{found}<h3>Norms of parameters' gradients</h3>{_deviations(norms)}"
    return found + paragraph("Norms of parameters were not measured (metrics.log_parameter_norms).")


def _deviations(found: list[Deviation]) -> str:
    heads = [
        "quantity",
        "step",
        "baseline",
        "candidate",
        "relative difference",
        "reach",
        "steps out",
    ]
    rows = [
        [
            one.quantity.removeprefix(NORM_OF),
            str(one.step),
            ABSENT if one.quantity.startswith(LOAD_OF) else number(one.baseline),
            ABSENT if one.quantity.startswith(LOAD_OF) else number(one.candidate),
            relative_words(one.relative),
            ABSENT if one.reach is None else f"{one.reach:.3g}",
            ABSENT if one.steps_outside is None else str(one.steps_outside),
        ]
        for one in found
    ]
    kinds = ["beyond" if (one.reach or 0) > 1 else "" for one in found]
    shown = table(heads, rows[:_MOST_ROWS], numbers=range(1, 7), kinds=kinds)
    if len(rows) > _MOST_ROWS:
        below = slice(_MOST_ROWS, _MOST_FOLDED)
        rest = table(heads, rows[below], numbers=range(1, 7), kinds=kinds[below])
        more = f"{len(rows) - _MOST_ROWS} more that differ less"
        more += f", the first {_MOST_FOLDED - _MOST_ROWS}" if len(rows) > _MOST_FOLDED else ""
        shown += folded(more, rest)
    return shown


def _band(comparison: Comparison) -> str:
    band = comparison.band
    if band is None:
        return paragraph(
            "There is no band: no harmless repeats, or none that say anything of what differs."
        )
    stated = band.as_json()["false_alarms"]
    names = ", ".join(repeat.name for repeat in band.repeats)
    found = paragraph(
        f"Measured from {len(band.repeats)} harmless repeats of the baseline, over steps "
        f"{band.steps[0]} to {band.steps[-1]}, in {len(band.quantities)} quantities. Compared are "
        "all quantities at every step and as means over the last 2, 4, 8, ... steps, in spreads of "
        "the repeats. A curve's statistic is its largest distance from their middle over the bound "
        f"that noise may reach; outside is above {band.limit:.3g}."
    )
    found += paragraph(
        f"False alarms: a harmless curve is outside in {100 * stated['if_log_normal']:.2g} % of "
        f"cases if the statistic is log-normal, and in at most {100 * stated['at_most']:.2g} % "
        "whatever it is."
    )

    def draw(figure: "Figure") -> None:
        draw_standing(figure.subplots(), comparison)
        legend(figure)

    if comparison.judgement is not None:
        chart = _chart("statistics of the repeats and the candidate", draw, height=1.6)
        found += f"<div class=charts>{chart}</div>"
    return found + folded("The repeats", paragraph(names))
