"""The gate of each family, made once per test session."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from titan_moe.config.load import load_job
from titan_moe.verify.gate import Gate

CONFIGS = Path(__file__).parents[2] / "configs" / "debug"

Gates = Callable[[str], Gate]


@pytest.fixture(scope="session")
def gates(tmp_path_factory) -> Gates:
    """Family -> its gate."""

    def gate(family: str) -> Gate:
        torch.set_num_threads(1)
        job = load_job(["--job.config_file", str(CONFIGS / f"gate_{family}.toml")])
        return Gate(job, tmp_path_factory.mktemp(family))

    return cache(gate)
