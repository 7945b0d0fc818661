"""How a trial ended, and what a run may say."""

import re
from collections.abc import Sequence
from typing import NamedTuple

_LONGEST = 1500
# The name of a Python exception tells a user nothing.
_RAW = re.compile(r"Traceback|\b[A-Z]\w*(Error|Exception)\b|<class '|object at 0x")


class Outcome(NamedTuple):
    """How a trial ended."""

    kind: str
    """read: the run took what it was given; refused: it said in clear lines why not; resumed: it
    went on and became the undisturbed run; missed: it ended before anything befell it; failed."""
    said: str


def refused(lines: Sequence[str]) -> Outcome:
    """Judges the lines that a user got instead of a run."""
    for line in lines:
        if not line or len(line) > _LONGEST or _RAW.search(line):
            return Outcome("failed", f"unclear: {line[:_LONGEST]!r}")
    return Outcome("refused", "; ".join(lines)) if lines else Outcome("failed", "without a word")
