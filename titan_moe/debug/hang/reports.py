"""The files of reports of hangs: written by one rank, read by `titan-moe report hang`."""

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.debug.hang.analysis import analyse, numbers
from titan_moe.runtime.errors import reason
from titan_moe.runtime.files import parse_json

_VERSION = 1
_CALLS_SHOWN = 4


def write_report(folder: Path, world_size: int, records: Sequence[Mapping[str, Any]]) -> Path:
    """Complete or not at all; returns its path. Raises OSError."""
    path = folder / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.json"
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    hang = {"version": _VERSION, "world_size": world_size, "records": records}
    partial.write_text(json.dumps(hang), encoding="utf-8")
    partial.rename(path)
    return path


def read_report(path: Path) -> tuple[Path, dict[str, Any]]:
    """The report in a file, or the newest one in or below a folder. Raises ConfigError."""
    found = [path] if path.is_file() else sorted(path.rglob("hang-*.json"), key=lambda p: p.name)
    if not found:
        raise ConfigError([f"{path}: no report of a hang (hang-*.json) is there or below"])
    try:
        hang = parse_json(found[-1].read_bytes())
        if hang["version"] != _VERSION:
            raise ConfigError([f"{found[-1]}: version {hang['version']} is not known"])
        analyse(hang["records"], hang["world_size"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OSError) as error:
        raise ConfigError([f"{found[-1]}: no report of a hang: {reason(error)}"]) from None
    return found[-1], hang


def describe(hang: Mapping[str, Any]) -> list[str]:
    """The findings, then each rank's position, its last calls and its stack; ranks alike once."""
    lines = analyse(hang["records"], hang["world_size"])
    alike: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for record in hang["records"]:
        alike[tuple(_of_a_rank(record))].append(record["rank"])
    for words, ranks in sorted(alike.items(), key=lambda each: each[1]):
        lines += ["", f"rank {numbers(ranks)}: {words[0]}", *words[1:]]
    return lines


def _of_a_rank(record: Mapping[str, Any]) -> list[str]:
    lines = [f"step {record['step']}, {record['place']}"]
    if record["error"]:
        lines.append(f"  {record['error']}")
    for group in record["groups"]:
        for call in group["calls"][-_CALLS_SHOWN:]:
            state = "ended" if call["ended"] else "waits"
            words = f"{call['operation']} {call['place']}, step {call['step']}"
            members = numbers(group["ranks"])
            lines.append(f"  {state}  {group['axes']} {members} call {call['number']}: {words}")
    lines += [f"    {frame}" for frame in record["stack"]]
    for thread, stack in record["threads"].items():
        lines += [f"  thread {thread.rpartition(' (')[0]}", *(f"    {frame}" for frame in stack)]
    return lines
