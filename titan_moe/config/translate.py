"""A torchtitan file's tables in this version's words, and one line about what was left out."""

from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from titan_moe.config import pipeline
from titan_moe.config.torchtitan import TABLES, VALUE_REMEDIES, VALUES, Key

KEYS: dict[str, Key] = {
    f"{table}.{name}": key for table, keys in TABLES.items() for name, key in keys.items()
}
_PAGE = "docs/coming-from-torchtitan.md"
_CONVERTERS = "model.converters"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"


class Translation(NamedTuple):
    """Tables as JobConfig reads them, and what was done to them."""

    tables: dict[str, Any]
    without_effect: list[str]
    """Keys that ask for something which is not here and changes no number."""
    renamed: list[str]
    """Values that were read as another one."""

    def summary(self) -> list[str]:
        """One line for a run's start, or none."""
        parts = []
        if self.without_effect:
            parts.append(f"without effect here: {', '.join(self.without_effect)}")
        parts += self.renamed
        return [f"{'; '.join(parts)} ({_PAGE})"] if parts else []


def translate(tables: dict[str, Any], converters: Iterable[str]) -> Translation:
    """Leave out what torchtitan knows and this version does without, and rename values.

    What is to be refused stays in, for JobConfig's own validation to find.

    Args:
        tables: of a TOML file or a command line, nested.
        converters: those that the whole run names, by our names; the keys of another converter's
            table ask for nothing.
    """
    found = Translation({}, [], [])
    named = set(converters)
    idle = {_table_of(key) for key in KEYS if key.startswith("quantize.")} - named
    for key, value in _leaves(tables):
        known = KEYS.get(key)
        if value == {} and any(each.startswith(f"{key}.") for each in KEYS):
            continue  # A table without keys.
        if known is None or known.fate == "same":
            put(found.tables, key, _renamed(key, value, found.renamed))
        elif _asks_for_nothing(value, known) or _table_of(key) in idle:
            continue
        elif known.fate == "refused":
            put(found.tables, key, value)
        else:
            found.without_effect.append(key)
    return found


def converters_of(tables: dict[str, Any]) -> list[str]:
    """The converters that the tables switch on, by our names."""
    model = tables.get("model")
    value = model.get("converters") if isinstance(model, dict) else None
    words = _renamed(_CONVERTERS, [] if value is None else value, [])
    return [str(word) for word in words] if isinstance(words, list) else []


def unknown_key(key: str, value: str, known: Iterable[str], *, source: str) -> str:
    """The one line about a dotted `key` that is not ours: its remedy, else which key is nearest."""
    given = f"{key} = {value} ({source}): "
    if key in KEYS:
        return given + KEYS[key].note
    if near := _nearest(key, known):
        return f"{given}no such key; did you mean {near}?"
    return f"{given}no such key; --help lists all of them"


def value_remedy(key: str, value: object) -> str | None:
    """The remedy for a value that torchtitan knows at a key of ours, and we do not."""
    if not isinstance(value, str):
        return None
    place = key.rstrip("0123456789").rstrip(".")  # An element of a list ends in its number.
    return VALUE_REMEDIES.get(place, {}).get(value)


def _asks_for_nothing(value: Any, key: Key) -> bool:
    """Whether it is torchtitan's own value, or switches something off."""
    return value == key.default or value is False or value in (None, "", [])


def _renamed(key: str, value: Any, told: list[str]) -> Any:
    """`value` by our names; what was changed goes to `told`."""
    default = KEYS[key].default if key in KEYS else None
    if isinstance(default, list) and isinstance(value, str):
        value = [word.strip() for word in value.split(",") if word.strip()]
    if isinstance(value, list):
        return [_word(key, each, told) for each in value]
    return _word(key, value, told)


def _word(key: str, value: Any, told: list[str]) -> Any:
    if not isinstance(value, str):
        return value
    ours = VALUES.get(key, {}).get(value, value)
    if key == _SCHEDULE:  # torchtitan reads it in any case.
        ours = {name.lower(): name for name in pipeline.SCHEDULES}.get(value.lower(), value)
    elif ours != value:
        told.append(f"{key} {value!r} is read as {ours!r}")
    return ours


def _leaves(tables: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; a table without keys is a leaf."""
    for name, value in tables.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def put(tables: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of nested tables."""
    *path, name = key.split(".")
    for table in path:
        tables = tables.setdefault(table, {})
    tables[name] = value


def _table_of(key: str) -> str:
    return key.rpartition(".")[0]


def _nearest(key: str, known: Iterable[str]) -> str | None:
    """The most similar key, if any is: its last part counts more than the table it is in."""

    def similarity(candidate: str) -> float:
        leaves = SequenceMatcher(None, _leaf(key), _leaf(candidate)).ratio()
        return (2 * leaves + SequenceMatcher(None, key, candidate).ratio()) / 3

    best = max(known, key=similarity)
    return best if similarity(best) > 0.6 else None


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]
