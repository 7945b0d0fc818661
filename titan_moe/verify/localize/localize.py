"""The first place of a step, in causal order, at which two runs differ beyond rounding.

Two captures are read in the order in which a step computes one from the other: the sequences, the
parameters at its start, what modules return, the losses, the gradients of modules' inputs (last
module first), the gradients of parameters, their norm, counts, biases, moments, parameters. What
differs first has no earlier cause in the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan_moe.training.capture.records import EXPERTS, PHASES, POSITION_BITS, TOKENS, Place
from titan_moe.verify.gradients.compare import fingerprint, first_few
from titan_moe.verify.localize.capture_reader import Capture, norms
from titan_moe.verify.localize.difference import PlaceDifference, differences


def locate(
    baseline: Capture, candidate: Capture, controls: Sequence[Capture] = ()
) -> "Finding | None":
    """The first place where two captures differ beyond rounding; None if there is none.

    Args:
        controls: of the baseline with its sequences in other orders, in other layouts: what
            rounding does at each place.
    """
    compared = differences(baseline, candidate, controls)
    wrong = [each for each in compared if each.error > each.bound]
    if not wrong:
        return None
    axes = _axes(baseline.facts["layout"], candidate.facts["layout"])
    return Finding(compared, wrong, baseline.sequences, axes, _tie(wrong[0], compared, baseline))


@dataclass(frozen=True)
class Finding:
    """The first difference, and what there is to know about it."""

    compared: Sequence[PlaceDifference]
    """All places, in causal order."""
    wrong: Sequence[PlaceDifference]
    """Places that differ beyond rounding, one at least."""
    sequences: Sequence[int]
    """Fingerprints of the baseline's sequences."""
    axes: Mapping[str, int]
    """Axes of which one run has more ranks, by how many times."""
    tie: str
    """The distance between the scores of experts or keys that rounding chose otherwise, in words;
    empty if something else is wrong."""

    @property
    def first(self) -> PlaceDifference:
        return self.wrong[0]

    def lines(self) -> list[str]:
        """Returns lines for a reader: the first place, its error, what precedes and follows it."""
        first, *later = self.wrong
        phase = first.place.phase
        lines = [f"first difference: {_place_line(first.place)}", *self._keys_line()]
        if first.copies:
            lines.append("  copies   ranks hold other values of the same shard")
        if phase != "data":
            cause = "" if first.copies else fingerprint(first.ratio, self.axes)
            lines += [
                f"  norms    about {first.norms[0]:.8g} and {first.norms[1]:.8g}, "
                f"ratio {first.ratio:.8g}{cause}",
                f"  off by   {first.off_by:.1e} of the norm, {first.error:.1e} at the worst; "
                f"rounding may do {first.bound:.1e}",
            ]
        if self.tie:
            lines.append(
                f"  a tie    {self.tie}: rounding alone chooses there. Compare with "
                "debug.routing_replay, where no choice can change"
            )
        num_wrong, num_places = self.of_phase()
        lines.append(f"  {num_wrong} of {num_places} places of this phase differ: {PHASES[phase]}")
        phases = [each for each in PHASES if any(d.place.phase == each for d in self.compared)]
        if equal := phases[: phases.index(phase)]:
            lines.append(f"  equal before it: {'; '.join(PHASES[each] for each in equal)}")
        then = [
            f"{_place_line(d.place)}: off by {d.off_by:.1e}, ratio {d.ratio:.6g}" for d in later
        ]
        if then:
            lines += ["  then:", *(f"    {line}" for line in first_few(then))]
        return lines

    def of_phase(self) -> tuple[int, int]:
        """Returns how many places of the first difference's phase differ, and how many it has."""
        alike = [each for each in self.compared if each.place.phase == self.first.place.phase]
        return sum(each.error > each.bound for each in alike), len(alike)

    def _keys_line(self) -> list[str]:
        kind, keys = self.first.kind, self.first.keys
        if kind not in (TOKENS, EXPERTS):
            return []
        shown = [str(key) for key in keys.tolist()]
        if kind == TOKENS:
            named, positions = np.divmod(keys, 1 << POSITION_BITS)
            number = {name: place for place, name in enumerate(self.sequences)}
            found = {name: positions[named == name] for name in np.unique(named).tolist()}
            shown = [
                f"sequence {number.get(name, '?')} ({name:08x}): {len(at)}, "
                f"first at position {at.min()}"
                for name, at in sorted(found.items(), key=lambda each: number.get(each[0], 0))
            ]
        return [f"  {kind:<8} {'all' if self.first.whole else '; '.join(first_few(shown))}"]


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
            shown = "; ".join(first_few([_place_line(place) for place in only]))
            lines.append(f"not compared: {count} only the {name} has: {shown}")
    if not any(len(baseline.places[p].keys) for p in baseline.places.keys() & candidate.places):
        lines.append("not compared: the runs have no place in common")
    return lines


def _axes(baseline: Mapping[str, int], candidate: Mapping[str, int]) -> dict[str, int]:
    """Axes of which one run has more ranks, by how many times."""
    sizes = {axis: candidate[axis] / baseline.get(axis, 1) for axis in candidate}
    sizes["fsdp"] = sizes["dp_shard"] * sizes["cp"]
    return {axis: round(max(size, 1 / size)) for axis, size in sizes.items()}


def _tie(choice: PlaceDifference, compared: Sequence[PlaceDifference], baseline: Capture) -> str:
    """Says how far apart the scores were of tokens that chose otherwise, if that is rounding.

    Nothing is known to be a tie if one run lacks scores.
    """
    if (choice.place.phase, choice.place.tensor) != ("forward", "choice"):
        return ""
    scores = choice.place._replace(tensor="scores")
    margins = baseline.places[choice.place._replace(tensor="margin")]
    margin = norms(margins.values[np.isin(margins.keys, choice.keys)])
    for each in compared:
        if each.place == scores and len(margin) == len(choice.keys):
            usual = norms(baseline.places[scores].values).mean()
            if margin.max() <= 2 * each.bound * usual:
                return f"scores are at most {margin.max():.1e} apart"
    return ""


def _place_line(place: Place) -> str:
    """A place in words: module, tensor and direction."""
    phase, module, tensor = place
    where = f"{module}, {tensor}" if module else tensor
    if phase == "backward":
        where = f"{module}, gradient of its {tensor}"
    return f"{where} ({PHASES[phase]})"
