"""The first place of a step, in causal order, at which two runs differ beyond rounding.

Two captures are read in the order in which a step computes one from the other: the sequences, the
parameters at its start, what modules return, the losses, the gradients of modules' inputs (last
module first), the gradients of parameters, their norm, counts, biases, moments, parameters. What
differs first has no earlier cause in the step.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from titan_moe.verify.gradients.compare import fingerprint
from titan_moe.verify.localize.capture.records import PHASES
from titan_moe.verify.localize.capture_reader import Capture, Ints
from titan_moe.verify.localize.difference import PlaceDifference, differences, norms_of
from titan_moe.verify.localize.finding import Finding, experts_line, place_line, tokens_line

_MOST_SHOWN = 5


def locate(
    baseline: Capture, candidate: Capture, controls: Sequence[Capture] = ()
) -> Finding | None:
    """The first place where two captures differ beyond rounding; None if there is none.

    Args:
        controls: of the baseline with its sequences in other orders, in other layouts: what
            rounding does at each place.
    """
    found = differences(baseline, candidate, controls)
    wrong = [difference for difference in found if difference.error > difference.bound]
    if not wrong:
        return None
    first, phase = wrong[0], wrong[0].place.phase
    axes = _axes(baseline.facts["layout"], candidate.facts["layout"])
    phases = Counter(difference.place.phase for difference in found)
    before = [each for each in PHASES if each in phases]
    finding = Finding(
        difference=first,
        fingerprint=fingerprint(first.ratio, axes) if first.ranks is None else "",
        of_phase=(sum(each.place.phase == phase for each in wrong), phases[phase]),
        equal=before[: before.index(phase)],
        later=wrong[1:],
    )
    if first.keys_are == "experts":
        finding = replace(finding, experts=experts_line(first.keys, first.whole))
    if first.keys_are == "tokens":
        finding = replace(finding, tokens=tokens_line(first.keys, baseline.rows, first.whole))
    if first.place.tensor == "choice":
        finding = _choices(finding, baseline, candidate, found)
    return finding


def uncompared(baseline: Capture, candidate: Capture) -> list[str]:
    """Returns a line for each run that has places which the other one lacks, and one if the runs
    share no place.

    A gradient that only the baseline has is a difference, and a recomputation is compared with the
    forward of its own run: neither is counted.
    """
    lines = []
    for name, ours, theirs in (
        ("baseline", baseline, candidate),
        ("candidate", candidate, baseline),
    ):
        skipped = ("recompute", "backward") if name == "baseline" else ("recompute",)
        only = [p for p in ours.places if p not in theirs.places and p.phase not in skipped]
        if only:
            shown = "; ".join(map(place_line, only[:_MOST_SHOWN]))
            more = f"; and {len(only) - _MOST_SHOWN} more" if len(only) > _MOST_SHOWN else ""
            count = f"{len(only)} of its {len(ours.places)} places"
            lines.append(f"not compared: {count} only the {name} has: {shown}{more}")
    if not any(len(baseline.places[p].keys) for p in baseline.places.keys() & candidate.places):
        lines.append("not compared: the runs have no place in common")
    return lines


def _axes(baseline: Mapping[str, int], candidate: Mapping[str, int]) -> dict[str, int]:
    """Axes of which one run has more ranks, by how many times."""
    sizes = {axis: candidate[axis] / baseline.get(axis, 1) for axis in candidate}
    sizes["fsdp"] = sizes["dp_shard"] * sizes["cp"]
    return {axis: round(max(size, 1 / size)) for axis, size in sizes.items()}


def _choices(
    finding: Finding, baseline: Capture, candidate: Capture, found: Sequence[PlaceDifference]
) -> Finding:
    """Adds the experts that tokens went to, and whether these scored alike; without scores in both
    runs nothing is known to be a tie."""
    place, keys = finding.place, finding.difference.keys
    ours, theirs = baseline.places[place], candidate.places[place]
    at, there = _rows_of(ours.keys, keys), _rows_of(theirs.keys, keys)
    margins = ours.beside["margins"][at]
    scores = place._replace(tensor="scores")
    swaps: Counter[tuple[str, str]] = Counter()
    for a, b in zip(ours.beside["experts"][at], theirs.beside["experts"][there], strict=True):
        left, came = sorted(set(a) - set(b)), sorted(set(b) - set(a))
        swaps[" ".join(map(str, left)), " ".join(map(str, came))] += 1
    said = [f"{n} x {a} -> {b}" for (a, b), n in swaps.most_common(3)]
    experts = ", ".join(said) + (f" and {len(swaps) - 3} other changes" if len(swaps) > 3 else "")
    tie = ""
    for bound in (each.bound for each in found if each.place == scores and len(margins)):
        if margins.max() <= 2 * bound * norms_of(baseline.places[scores].values, True).max():
            tie = f"scores are at most {margins.max():.1e} apart"
    return replace(finding, experts=experts, tie=tie)


def _rows_of(keys: Ints, wanted: Ints) -> Ints:
    places = {tuple(key): row for row, key in enumerate(keys.tolist())}
    return np.array([places[tuple(key)] for key in wanted.tolist() if tuple(key) in places])
