"""The gate of each family, made once per test session."""

from functools import cache

import pytest

from tests.support.gates import Gates, gate_of


@pytest.fixture(scope="session")
def gates(tmp_path_factory) -> Gates:
    """Family -> its gate."""
    return cache(lambda family: gate_of(family, tmp_path_factory.mktemp(family)))
