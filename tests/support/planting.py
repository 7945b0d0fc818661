"""A mistake in one line of production code: how it is named, and made.

The function is compiled anew inside the ranks of a run, wherever it was imported to.
"""

import inspect
from functools import reduce
from importlib import import_module
from textwrap import dedent
from types import FunctionType
from typing import NamedTuple, Protocol


class Bug(NamedTuple):
    """One line of production code, written wrongly."""

    where: str
    """module:function or module:class.method"""
    right: str
    """Stands in one line of it, once."""
    wrong: str
    caught_on: str
    """A layout on which the gate must see it: one of the sample's, with fewer axes and ranks."""
    named: tuple[str, ...]
    """Patterns of what the gate must say: the tensor, and what its ratio gives away."""
    spared: tuple[str, ...]
    """Patterns of "quantity name": what must be right after the first step all the same."""
    harmless_on: str = ""
    """A layout without the axis or option, which must pass with the bug. Empty: every layout has
    the mistake, and only a reference that shares no such code can show it."""
    family: str = "deepseek_v3"
    """Whose gate model has what goes wrong."""


class Line(Protocol):
    """Where a mistake is, and how the line reads without and with it: as in Bug."""

    @property
    def where(self) -> str: ...
    @property
    def right(self) -> str: ...
    @property
    def wrong(self) -> str: ...


def right_source(bug: Line) -> tuple[FunctionType, str]:
    """The function that a bug is in, and its source; AssertionError if the line is gone."""
    assert "\n" not in bug.right + bug.wrong, "a bug is one line"
    module, _, path = bug.where.partition(":")
    function = _plain(reduce(getattr, path.split("."), import_module(module)))
    source = dedent(inspect.getsource(function))
    assert source.count(bug.right) == 1, f"{bug.where} has no longer one {bug.right!r}"
    return function, source


def plant(bug: Line) -> None:
    """Change the function for the rest of this process; AssertionError if the line is gone."""
    function, source = right_source(bug)
    names = dict(function.__globals__)
    exec(source.replace(bug.right, bug.wrong), names)
    # Not the function but its code: other modules hold the function under names of their own.
    function.__code__ = _plain(names[function.__name__]).__code__


def _plain(function: object) -> FunctionType:
    """Without its decorators."""
    plain = inspect.unwrap(getattr(function, "__func__", function))  # type: ignore[arg-type]
    assert isinstance(plain, FunctionType)
    return plain
