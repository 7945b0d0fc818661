"""Sorts a test's cases into the default tier and the tiers above, and tests into slices."""

import zlib
from collections.abc import Iterable
from typing import Any

import pytest


def tiered(default: Iterable[Any], *, slow: Iterable[Any] = (), full: Iterable[Any] = ()) -> list:
    """Cases for parametrize, a tuple for several arguments; those above the default marked so."""
    cases = list(default)
    for mark, more in ((pytest.mark.slow, slow), (pytest.mark.full, full)):
        cases += [
            pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
            for case in more
        ]
    return cases


def split(cases: Iterable[Any], default: Iterable[Any], slow: Iterable[Any] | None = None) -> list:
    """All cases: some of the default tier, some slow, the rest full; without `slow`, the rest slow.

    Raises AssertionError if a case that is named is none of them.
    """
    cases, default = list(cases), list(default)
    rest = [case for case in cases if case not in default]
    slow = rest if slow is None else list(slow)
    assert all(case in cases for case in [*default, *slow]), "a case named is none of the cases"
    return tiered(default, slow=slow, full=[case for case in rest if case not in slow])


def in_slice(number: int, name: str, slices: int) -> bool:
    """Tells whether a slice has a test. As many consecutive numbers as there are slices have each
    test once, whatever other tests there are."""
    return (zlib.crc32(name.encode()) - number) % slices == 0
