"""The first place of a step, in causal order, at which two runs differ beyond rounding.

Two captures are read in the order in which a step computes one from the other: the sequences, the
parameters at its start, what modules return, the losses, the gradients of modules' inputs (last
module first), the gradients of parameters, their norm, counts, biases, moments, parameters. What
differs first has no earlier cause in the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from titan_moe.verify.localize.capture_reader import Capture, norms
from titan_moe.verify.localize.difference import differences
from titan_moe.verify.localize.finding import Finding, first_few, place_line


def locate(
    baseline: Capture, candidate: Capture, controls: Sequence[Capture] = ()
) -> Finding | None:
    """The first place where two captures differ beyond rounding; None if there is none.

    Args:
        controls: of the baseline with its sequences in other orders, in other layouts: what
            rounding does at each place.
    """
    axes = _axes(baseline.facts["layout"], candidate.facts["layout"])
    finding = Finding(differences(baseline, candidate, controls), baseline.rows, axes)
    if not finding.wrong:
        return None
    place = finding.first.place
    if (place.phase, place.tensor) == ("forward", "choice"):
        return replace(finding, tie=_tie(finding, baseline))
    return finding


def uncompared(baseline: Capture, candidate: Capture) -> list[str]:
    """Returns a line for each run that has places which the other one lacks, and one if the runs
    share no place.

    A gradient that only the baseline has is a difference, and a recomputation is compared with the
    forward of its own run: neither is counted.
    """
    lines = []
    for name, ours, theirs, counted_elsewhere in (
        ("baseline", baseline, candidate, ("recompute", "backward")),
        ("candidate", candidate, baseline, ("recompute",)),
    ):
        only = [place for place in ours.places if place not in theirs.places]
        only = [place for place in only if place.phase not in counted_elsewhere]
        if only:
            count = f"{len(only)} of its {len(ours.places)} places"
            shown = "; ".join(first_few([place_line(place) for place in only]))
            lines.append(f"not compared: {count} only the {name} has: {shown}")
    if not any(len(baseline.places[p].keys) for p in baseline.places.keys() & candidate.places):
        lines.append("not compared: the runs have no place in common")
    return lines


def _axes(baseline: Mapping[str, int], candidate: Mapping[str, int]) -> dict[str, int]:
    """Axes of which one run has more ranks, by how many times."""
    sizes = {axis: candidate[axis] / baseline.get(axis, 1) for axis in candidate}
    sizes["fsdp"] = sizes["dp_shard"] * sizes["cp"]
    return {axis: round(max(size, 1 / size)) for axis, size in sizes.items()}


def _tie(finding: Finding, baseline: Capture) -> str:
    """Says how far apart the scores were of tokens that chose otherwise, if that is rounding.

    Nothing is known to be a tie if one run lacks scores.
    """
    choice = finding.first
    scores = choice.place._replace(tensor="scores")
    margins = baseline.places[choice.place._replace(tensor="margin")]
    margin = norms(margins.values[np.isin(margins.keys, choice.keys)])
    for each in finding.compared:
        if each.place == scores and len(margin) == len(choice.keys):
            usual = norms(baseline.places[scores].values).mean()
            if margin.max() <= 2 * each.bound * usual:
                return f"scores are at most {margin.max():.1e} apart"
    return ""
