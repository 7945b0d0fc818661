"""The tables of docs/configuration.md: every key of the TOML files, from the classes themselves."""

import inspect
import json
import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from titan_moe.config.job_config import JobConfig, Section
from titan_moe.config.parse import known_keys

_KEYS = known_keys()
_QUOTES = "'\""
# Code in a docstring: lists and tables, words in quotes, names with a dot or an underscore.
_CODE = re.compile(r"""\[\[.*?\]\]|(?<!\w)'[^' ]+'|"[^" ]+"|(?<![\w/.:])[A-Za-z]\w*(?:[./]\w+)*""")


def tables() -> str:
    """Returns a heading for each TOML table, and under it each of its keys."""
    parts = []
    sections = dict(_sections(JobConfig, ""))
    for name, section in sections.items():
        parts.append(f"## [{name}] {{#{name}}}\n\n{_prose(section.__doc__, name)}")
        for key, field in section.model_fields.items():
            if not _is_section(field.annotation) or f"{name}.{key}" not in sections:
                parts.append(_key(name, key, field))
    return "\n\n".join(parts)


def _sections(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    """Yields every table that has keys of its own, depth first, with its dotted name."""
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        dotted = prefix + name
        if _is_section(kind):
            if not all(_is_section(each.annotation) for each in kind.model_fields.values()):
                yield dotted, kind
            yield from _sections(kind, f"{dotted}.")
        elif get_origin(kind) in (list, dict) and _is_section(get_args(kind)[-1]):
            yield dotted, get_args(kind)[-1]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _key(table: str, key: str, field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        says = "required"
    elif default is None or isinstance(default, Section):
        says = "left out by default"
    else:
        says = f"default `{_toml(default)}`"
    return (
        f"### `{key}` {{#{table}.{key}}}\n\n"
        f"{_kind(field.annotation, field.metadata)}, {says}\n{{.key-type}}\n\n"
        f"{_prose(field.description, table)}"
    )


def _prose(text: str | None, table: str) -> str:
    """Returns a docstring as Markdown: one paragraph, in which keys are links and names are
    code."""

    def mark(word: re.Match[str]) -> str:
        for key in (word[0], f"{table}.{word[0]}"):
            if key in _KEYS and not word[0].isalpha():
                return f"[`{word[0]}`](#{key})"
        return f"`{word[0].strip(_QUOTES)}`" if set(word[0]) & set("._[" + _QUOTES) else word[0]

    return _CODE.sub(mark, " ".join(inspect.cleandoc(text or "").split()))


def _kind(kind: Any, metadata: list[Any]) -> str:
    """Returns the type of a key's values in words, with their bounds."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(_kind(each, metadata) for each in inner if each is not NoneType)
    if hasattr(kind, "__metadata__"):
        return _kind(kind.__origin__, [*kind.__metadata__, *metadata])
    if origin is Literal:
        return "one of " + ", ".join(f"`{_toml(each)}`" for each in inner)
    if origin in (list, dict) and _is_section(inner[-1]):
        return "tables"
    if origin is list:
        each = _kind(inner[0], [])
        return "list of " + (each.removeprefix("one of ") if "`" in each else _plural(each))
    if origin is dict or _is_section(kind):
        return "table"
    name = {bool: "boolean", int: "integer", float: "number", str: "string"}[kind]
    bounds = [
        f"{sign} {value}"
        for each in _flat(metadata)
        for rule, sign, value in (
            (Gt, ">", getattr(each, "gt", None)),
            (Ge, "≥", getattr(each, "ge", None)),
            (Lt, "<", getattr(each, "lt", None)),
            (Le, "≤", getattr(each, "le", None)),
        )
        if isinstance(each, rule)
    ]
    return " ".join([name, " and ".join(bounds)]).strip()


def _plural(kind: str) -> str:
    first, *rest = kind.split(" ", 1)
    return " ".join([f"{first}s", *rest])


def _flat(metadata: list[Any]) -> Iterator[Any]:
    for each in metadata:
        yield from getattr(each, "metadata", [each])


def _toml(value: Any) -> str:
    """Returns a value as a TOML file writes it."""
    return json.dumps(value)
