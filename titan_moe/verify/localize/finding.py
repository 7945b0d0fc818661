"""The first difference of two captures: what is known of it, and in words."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from titan_moe.verify.localize.capture.records import PHASES, Place
from titan_moe.verify.localize.capture_reader import Ints
from titan_moe.verify.localize.difference import PlaceDifference

_MOST_ROWS, _MOST_LATER = 3, 5
_CLEAR = 10  # Times its bound; nearer, an earlier place may just have passed.


@dataclass(frozen=True)
class Finding:
    """The first difference, and what there is to know about it."""

    difference: PlaceDifference
    tokens: str = ""
    """Rows and positions."""
    experts: str = ""
    fingerprint: str = ""
    """The reduction that the ratio of norms points to."""
    tie: str = ""
    """If a routing choice changed because two experts scored alike: how far apart they were."""
    of_phase: tuple[int, int] = (0, 0)
    """Places of the phase that differ, and all of them."""
    equal: Sequence[str] = ()
    """Phases that came before and are equal."""
    later: Sequence[PlaceDifference] = field(default_factory=list)
    """The next places that differ."""

    @property
    def place(self) -> Place:
        return self.difference.place

    @property
    def is_tie(self) -> bool:
        """Rounding chose other experts: nothing is known to be wrong."""
        return bool(self.tie)

    def lines(self) -> list[str]:
        """For a person: the first place and by how much; what is equal before it, what follows."""
        first = self.difference
        lines = [f"first difference: {place_line(first.place)}"]
        if self.tokens:
            lines.append(f"  tokens   {self.tokens}")
        if self.experts:
            lines.append(f"  experts  {self.experts}")
        if first.ranks is not None:
            lines.append(
                f"  copies   ranks {first.ranks[0]} and {first.ranks[1]} hold other values"
            )
        if first.place.phase != "data":
            lines.append(
                f"  norms    {first.norms[0]:.8g} and {first.norms[1]:.8g}, "
                f"ratio {first.ratio:.8g}{self.fingerprint}"
            )
            lines.append(
                f"  off by   {first.off_by:.1e} of the norm, {first.error:.1e} at the worst; "
                f"rounding may do {first.bound:.1e}"
            )
        if first.missing:
            lines.append("  missing  no gradient was seen here")
        if self.is_tie:
            lines.append(
                f"  a tie    {self.tie}: rounding alone chooses there. Compare with "
                "debug.routing_replay, where no choice can change"
            )
        wrong, places = self.of_phase
        lines.append(
            f"  {wrong} of {places} places of this phase differ: {PHASES[first.place.phase]}"
        )
        if self.equal:
            equal = "; ".join(PHASES[phase] for phase in self.equal)
            lines.append(f"  equal before it: {equal}")
        if first.error < _CLEAR * first.bound:
            lines.append(
                "  close to rounding, so an earlier place may be the cause: look again with "
                "--training.dtype float64"
            )
        if self.later:
            lines.append("  then:")
            for each in self.later[:_MOST_LATER]:
                by = f"off by {each.off_by:.1e}, ratio {each.ratio:.6g}"
                lines.append(f"    {place_line(each.place)}: {by}")
            if (rest := len(self.later) - _MOST_LATER) > 0:
                lines.append(f"    and {rest} more")
        return lines


def tokens_line(keys: Ints, rows: Sequence[int], whole: bool) -> str:
    """Rows by their number in the baseline's batch, and the positions in each."""
    if whole:
        return "all tokens"
    number = {row: place for place, row in enumerate(rows)}
    by_row: dict[int, list[int]] = {}
    for row, position in keys.tolist():
        by_row.setdefault(row, []).append(position)
    ordered = sorted(by_row, key=lambda row: number.get(row, len(number)))
    shown = [
        f"row {number.get(row, '?')} ({row:08x}): {_ranges(sorted(by_row[row]))}"
        for row in ordered[:_MOST_ROWS]
    ]
    rest = len(ordered) - _MOST_ROWS
    return "; ".join(shown) + (f"; and {rest} more of {len(rows)} rows" if rest > 0 else "")


def experts_line(keys: Ints, whole: bool) -> str:
    """Experts by number."""
    if whole:
        return "all experts"
    return f"expert{'s' * (len(keys) > 1)} {_ranges(keys[:, 0].tolist(), '')}"


def _ranges(numbers: Sequence[int], word: str = "position") -> str:
    """Consecutive numbers as ranges; of many ranges the first ones."""
    spans = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        spans.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    shown = ", ".join(spans[:4]) + (f" and {len(spans) - 4} more spans" if len(spans) > 4 else "")
    return f"{word}{'s' * (len(numbers) > 1)} {shown}" if word else shown


def place_line(place: Place) -> str:
    """A place in words: module, tensor and direction."""
    phase, module, tensor = place
    where = f"{module}, {tensor}" if module else tensor
    if phase == "backward":
        where = f"{module}, gradient of its {tensor}"
    return f"{where} ({PHASES[phase]})"
