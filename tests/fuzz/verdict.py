"""What a trial may say."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.apart import Outcome

_LONGEST = 1500
# The name of a Python exception tells a user nothing.
_RAW = re.compile(r"Traceback|\b[A-Z]\w*(Error|Exception)\b|<class '|object at 0x")


def refused(lines: Sequence[str]) -> Outcome:
    """Lines that a user got instead of a run, if a user can use them."""
    shown = [" ".join(line.split()) for line in lines]  # As runtime.failure prints them.
    for line in shown:
        if not line or len(line) > _LONGEST or _RAW.search(line):
            return Outcome("failed", f"unclear: {line[:_LONGEST]!r}")
    return Outcome("refused", "; ".join(shown)) if shown else Outcome("failed", "without a word")


def of_failures(folder: Path, exit_code: int) -> Outcome:
    """From the record that a failing rank leaves in `folder` (runtime.failure)."""
    records = [json.loads(path.read_text()) for path in folder.rglob("rank-*.json")]
    if len(records) != 1:
        return Outcome("failed", f"exit code {exit_code} with {len(records)} records of a failure")
    (record,) = records
    if not record["expected"]:
        return Outcome("failed", f"unforeseen: {record['lines']}")
    return refused(record["lines"])
