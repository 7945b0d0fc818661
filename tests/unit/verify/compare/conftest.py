"""A launcher whose runs take no time."""

from pathlib import Path

import pytest

from tests.support.stub_runs import stubbed
from titan_moe.verify.compare.launch import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return stubbed(tmp_path)
