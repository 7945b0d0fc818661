"""A finding of the localizer in words."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from titan_moe.verify.localize.capture_reader import Ints

if TYPE_CHECKING:
    from titan_moe.verify.localize.localize import Difference, Finding

_MOST_ROWS, _MOST_FOLLOWERS = 3, 5
_CLEAR = 10  # Times its bound; nearer, what was first may have been let pass.
PHASE_WORDS = {
    "data": "what the step reads",
    "start": "parameters at the step's start",
    "forward": "forward",
    "loss": "losses",
    "recompute": "recomputed in the backward, against the candidate's own forward",
    "backward": "backward",
    "gradient": "gradients of parameters, summed over ranks",
    "norm": "gradient norm",
    "counts": "tokens per expert",
    "balance": "what routers keep for the next step",
    "moments": "moments of AdamW",
    "update": "what the optimizer adds",
    "parameters": "parameters at the step's end",
}


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


def place_line(difference: "Difference") -> str:
    """A place in words: module, tensor and direction."""
    phase, module, tensor = difference.place
    where = f"{module}, {tensor}" if module else tensor
    if phase == "backward":
        where = f"{module}, gradient of its {tensor}"
    return f"{where} ({PHASE_WORDS[phase]})"


def finding_lines(finding: "Finding") -> list[str]:
    """What parted first, where, by how much; then what is equal before it and what follows."""
    first = finding.difference
    lines = [f"the runs part at: {place_line(first)}"]
    if finding.tokens:
        lines.append(f"  tokens   {finding.tokens}")
    if finding.experts:
        lines.append(f"  experts  {finding.experts}")
    if first.ranks is not None:
        lines.append(f"  copies   ranks {first.ranks[0]} and {first.ranks[1]} hold other values")
    if first.place.phase != "data":
        lines.append(
            f"  norms    {first.norms[0]:.8g} and {first.norms[1]:.8g}, "
            f"ratio {first.ratio:.8g}{finding.told}"
        )
        lines.append(
            f"  off by   {first.off_by:.1e} of the norm, {first.error:.1e} at the worst; "
            f"rounding may do {first.bound:.1e}"
        )
    if first.missing:
        lines.append("  missing  no gradient came by here")
    if finding.is_tie:
        lines.append(
            f"  a tie    {finding.tie}: rounding alone chooses there. Compare with "
            "debug.routing_replay, where no choice can flip"
        )
    wrong, places = finding.of_phase
    lines.append(
        f"  {wrong} of {places} places of this phase differ: {PHASE_WORDS[first.place.phase]}"
    )
    if finding.equal:
        equal = "; ".join(PHASE_WORDS[phase] for phase in finding.equal)
        lines.append(f"  equal before it: {equal}")
    if first.error < _CLEAR * first.bound:
        lines.append(
            "  close to rounding, so an earlier place may be to blame: look again with "
            '--set "--training.dtype float64"'
        )
    if finding.followers:
        lines.append("  then:")
        for each in finding.followers[:_MOST_FOLLOWERS]:
            lines.append(
                f"    {place_line(each)}: off by {each.off_by:.1e}, ratio {each.ratio:.6g}"
            )
        if (rest := len(finding.followers) - _MOST_FOLLOWERS) > 0:
            lines.append(f"    and {rest} more")
    return lines
