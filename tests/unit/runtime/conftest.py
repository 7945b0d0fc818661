"""The signals that tests of launchers start with."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _hangs_up() -> Iterator[None]:
    """Let SIGHUP end processes, also where nohup has started the suite."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
