"""The first difference of two captures, in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan_moe.verify.gradients.compare import fingerprint
from titan_moe.verify.localize.capture.records import EXPERTS, PHASES, POSITION_BITS, TOKENS, Place
from titan_moe.verify.localize.difference import PlaceDifference

_MOST_SHOWN = 5


@dataclass(frozen=True)
class Finding:
    """The first difference, and what there is to know about it."""

    compared: Sequence[PlaceDifference]
    """All places, in causal order."""
    rows: Sequence[int]
    """Fingerprints of the baseline's rows."""
    axes: Mapping[str, int]
    """Axes of which one run has more ranks, by how many times."""
    tie: str = ""
    """If a choice changed because two experts or keys scored alike: how far apart they were."""

    @property
    def wrong(self) -> list[PlaceDifference]:
        return [each for each in self.compared if each.error > each.bound]

    @property
    def first(self) -> PlaceDifference:
        return self.wrong[0]

    @property
    def is_tie(self) -> bool:
        """Rounding chose other experts or keys: nothing is known to be wrong."""
        return bool(self.tie)

    def lines(self) -> list[str]:
        """Returns lines for a reader: the first place, its error, what precedes and follows it."""
        first, *later = self.wrong
        phase = first.place.phase
        lines = [f"first difference: {place_line(first.place)}", *self._keys_line()]
        if first.copies:
            lines.append("  copies   ranks hold other values of the same part")
        if phase != "data":
            cause = "" if first.copies else fingerprint(first.ratio, self.axes)
            lines += [
                f"  norms    about {first.norms[0]:.8g} and {first.norms[1]:.8g}, "
                f"ratio {first.ratio:.8g}{cause}",
                f"  off by   {first.off_by:.1e} of the norm, {first.error:.1e} at the worst; "
                f"rounding may do {first.bound:.1e}",
            ]
        if self.is_tie:
            lines.append(
                f"  a tie    {self.tie}: rounding alone chooses there. Compare with "
                "debug.routing_replay, where no choice can change"
            )
        num_wrong, num_places = self.of_phase()
        lines.append(f"  {num_wrong} of {num_places} places of this phase differ: {PHASES[phase]}")
        phases = [each for each in PHASES if any(d.place.phase == each for d in self.compared)]
        if equal := phases[: phases.index(phase)]:
            lines.append(f"  equal before it: {'; '.join(PHASES[each] for each in equal)}")
        then = [f"{place_line(d.place)}: off by {d.off_by:.1e}, ratio {d.ratio:.6g}" for d in later]
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
            key_rows, positions = np.divmod(keys, 1 << POSITION_BITS)
            number = {row: place for place, row in enumerate(self.rows)}
            by_row = {row: positions[key_rows == row] for row in np.unique(key_rows).tolist()}
            shown = [
                f"row {number.get(row, '?')} ({row:08x}): {len(at)}, first at position {at.min()}"
                for row, at in sorted(by_row.items(), key=lambda each: number.get(each[0], 0))
            ]
        return [f"  {kind:<8} {'all' if self.first.whole else '; '.join(first_few(shown))}"]


def first_few(items: Sequence[str]) -> list[str]:
    """Returns the first items and, in a last one, how many others there are."""
    more = len(items) - _MOST_SHOWN
    return [*items[:_MOST_SHOWN], f"and {more} more"] if more > 0 else list(items)


def place_line(place: Place) -> str:
    """A place in words: module, tensor and direction."""
    phase, module, tensor = place
    where = f"{module}, {tensor}" if module else tensor
    if phase == "backward":
        where = f"{module}, gradient of its {tensor}"
    return f"{where} ({PHASES[phase]})"
