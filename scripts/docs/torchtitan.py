"""The tables of docs/coming-from-torchtitan.md: every key of torchtitan, from the data that reads
its files."""

from typing import Any

from titan_moe.config.job_config import JobConfig, Section
from titan_moe.config.torchtitan import TABLES, VALUE_REMEDIES, VALUES, Key

_HEAD = "| key | default in torchtitan | here |\n|---|---|---|"


def table() -> str:
    """A heading for each TOML table of torchtitan, and under it a line for each of its keys."""
    parts = []
    for name, keys in TABLES.items():
        lines = [_line(name, key, row) for key, row in keys.items()]
        parts.append("\n".join([f"### [{name}] {{ #{name} }}", "", _HEAD, *lines]))
    return "\n\n".join(parts)


def _line(table: str, name: str, row: Key) -> str:
    key = f"{table}.{name}"
    if row.fate == "same":
        shown = f"[`{name}`](configuration.md#{key})"
        parts = ["accepted", *_default(key, row.default), *_values(key)]
        here = "; ".join([*parts, row.note] if row.note else parts)
    else:
        shown = f"`{name}`"
        fate = "without effect" if row.fate == "no effect" else "refused"
        here = f"{fate}: {row.note}"
    return f"| {shown} | {_toml(row.default)} | {here} |"


def _default(key: str, theirs: Any) -> list[str]:
    """What is ours where it is another one."""
    value: Any = JobConfig()
    for name in key.split("."):
        value = getattr(value, name)
        assert value is None or isinstance(value, (Section, list, str, bool, int, float))
    return [] if value == theirs else [f"default here: {_toml(value)}"]


def _values(key: str) -> list[str]:
    """Values of torchtitan that are read as another one, and those that are refused."""
    renamed = [f"`{a}` is read as `{b}`" for a, b in VALUES.get(key, {}).items()]
    refused = ", ".join(f"`{value}`" for value in VALUE_REMEDIES.get(key, {}))
    return [*renamed, f"refused: {refused}"] if refused else renamed


def _toml(value: Any) -> str:
    if value is None:
        return "left out"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return "`[" + ", ".join(f'"{each}"' for each in value) + "]`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"
