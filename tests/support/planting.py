"""A mistake in one line of production code: how it is named, and made.

The function is compiled anew inside the ranks of a run, wherever it was imported to.
"""

import inspect
import os
from functools import reduce
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from types import FunctionType
from typing import Any, NamedTuple

from titan_moe.config.parse import tomllib


class Bug(NamedTuple):
    """One line of production code, written wrongly; planted_bugs.toml explains the fields."""

    where: str
    right: str
    wrong: str
    caught_on: str = ""
    named: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()
    harmless_on: str = ""
    family: str = "deepseek_v3"
    kind: str = "AdamW"
    """The kind of gate (`gates.KINDS`)."""
    quick: bool = False
    localized: tuple[str, ...] = ()
    whole_phase: bool = False
    """All of the phase must be wrong, because the mistake is in no module of the model."""
    copies: bool = False
    """The ranks' copies of one tensor must differ."""
    museum: tuple[str, ...] = ()
    """Threads of other projects with this mistake, as OWNER/REPOSITORY#NUMBER."""
    hall: str = ""
    story: str = ""


class Desync(NamedTuple):
    """One line of production code, written wrongly; planted_desyncs.toml explains the fields."""

    where: str
    right: str
    wrong: str
    trial: str
    group: str
    says: list[str]
    ranks: int
    family: str
    options: list[str]


def planted_bugs() -> dict[str, Bug]:
    """Reads planted_bugs.toml, by name."""
    return _planted("planted_bugs.toml", "bug", Bug)


def planted_desyncs() -> dict[str, Desync]:
    """Reads planted_desyncs.toml, by name."""
    return _planted("planted_desyncs.toml", "desync", Desync)


def _planted(file: str, table: str, kind: Any) -> dict[str, Any]:
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    return {entry.pop("name"): kind(**entry) for entry in tomllib.loads(text)[table]}


def right_source(bug: Any) -> tuple[FunctionType, str]:
    """Returns the function that a bug is in, and its source.

    `bug` says `where`, `right` and `wrong`, as Bug does. AssertionError if the line is gone.
    """
    assert "\n" not in bug.right + bug.wrong, "a bug is one line"
    module, _, path = bug.where.partition(":")
    function = _plain(reduce(getattr, path.split("."), import_module(module)))
    source = dedent(inspect.getsource(function))
    assert source.count(bug.right) == 1, f"{bug.where} has no longer one {bug.right!r}"
    return function, source


def plant(bug: Any) -> None:
    """Change the function for the rest of this process; AssertionError if the line is gone."""
    function, source = right_source(bug)
    names = dict(function.__globals__)
    exec(source.replace(bug.right, bug.wrong), names)
    # Not the function but its code: other modules hold the function under names of their own.
    function.__code__ = _plain(names[function.__name__]).__code__


def plant_in_ranks(bug: Bug) -> None:
    """Plant a bug if torchrun started this process: one that only checks a configuration imports
    the plug-in too, and stays right."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        plant(bug)


def _plain(function: object) -> FunctionType:
    """Returns a function without its decorators."""
    plain = inspect.unwrap(getattr(function, "__func__", function))  # type: ignore[arg-type]
    assert isinstance(plain, FunctionType)
    return plain
