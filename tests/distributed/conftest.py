"""The gate of each family, made once per test session."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from titan_moe.config.parse import load_job
from titan_moe.verify.gradients.gate import Gate

CONFIGS = Path(__file__).parents[2] / "configs" / "debug"

Gates = Callable[[str], Gate]


def gate_of(family: str, folder: Path) -> Gate:
    torch.set_num_threads(1)
    return Gate(load_job(["--job.config_file", str(CONFIGS / f"gate_{family}.toml")]), folder)


@pytest.fixture(scope="session")
def gates(tmp_path_factory) -> Gates:
    """Family -> its gate."""
    return cache(lambda family: gate_of(family, tmp_path_factory.mktemp(family)))
