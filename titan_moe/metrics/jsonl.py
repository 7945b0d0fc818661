"""Writes metrics.jsonl and files like it: one JSON object per logged step, across kills and
resumes."""

import json
import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_moe.runtime.files import replacing, set_aside

EVENTS = "events.jsonl"
INITIAL_WEIGHTS = "initial_weights.json"
PREDICTED = "predicted/"
"""Begins the metrics that are a step's estimated seconds by region (training/run_log.py)."""

logger = logging.getLogger(__name__)


class JsonLines:
    """Appends {"step": ..., <key>: <value>, ...} lines, each at once; what is not finite is null.

    A run that starts at step 0 beside the file of an earlier run first sets that file aside as
    metrics.1.jsonl, metrics.2.jsonl, ... A run that resumes continues it: see drop_lines_after.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if resume_step == 0:
                keep_earlier(path)
            else:
                drop_lines_after(path, resume_step)
        self._path = path
        # Without a buffer, which would cut a line of many layers into pieces.
        self._file = path.open("ab", buffering=0)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        line = json.dumps({"step": step, **_finite(values)}).encode() + b"\n"
        try:
            while line:  # One call, but for a disk that is nearly full.
                line = line[self._file.write(line) or 0 :]
        except OSError as error:  # It does not say where.
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        self._file.close()


def set_events_aside(folder: Path, *, resume_step: int) -> None:
    """Set an earlier run's events.jsonl aside, in a run that starts at step 0."""
    if resume_step == 0 and (folder / EVENTS).exists():
        keep_earlier(folder / EVENTS)


def add_event(folder: Path, step: int, values: Mapping[str, Any]) -> None:
    """Add a decision of the run about a step to events.jsonl, which begins with the first one.

    Lines are only added. A run that resumes keeps those of the steps that it makes again, so a step
    may have several.
    """
    lines = JsonLines(folder / EVENTS, resume_step=sys.maxsize)
    lines.write(step, values)
    lines.close()


def drop_lines_after(path: Path, step: int) -> None:
    """Take out the lines of later steps, which will be run again, and a line torn by a kill.

    Torn is only what follows the last line end; a line that is no step's object stays as it is. The
    new file replaces the old one whole: a kill in here loses nothing.
    """
    content = path.read_bytes()
    *lines, rest = content.split(b"\n")
    if _parse(rest) is not None:
        lines.append(rest)
    kept = b"".join(line + b"\n" for line in lines if not _is_after(line, step))
    if kept == content:
        return
    with replacing(path) as aside:
        aside.write_bytes(kept)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl, also of one that is being written."""
    parsed = (_parse(line) for line in path.read_bytes().split(b"\n"))
    return [values for values in parsed if values is not None]


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_after(line: bytes, step: int) -> bool:
    values = _parse(line)
    return values is not None and isinstance(values.get("step"), int) and values["step"] > step


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def keep_earlier(path: Path) -> None:
    """Set an earlier run's file aside, and say so."""
    kept = set_aside(path, lambda number: f"{path.stem}.{number}{path.suffix}")
    logger.info("%s was of an earlier run: kept as %s", path, kept.name)
