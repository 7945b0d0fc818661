"""The gate of each family and kind, made once per test session."""

from functools import cache

import pytest

from tests.support.gates import Gates, gate_of


@pytest.fixture(scope="session")
def gates(tmp_path_factory) -> Gates:
    return cache(
        lambda family, kind="AdamW": gate_of(family, tmp_path_factory.mktemp(family), kind)
    )
