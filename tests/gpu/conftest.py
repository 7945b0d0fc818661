"""Tests that need a GPU: skipped without one, failed by one that torch cannot use."""

import os

import pytest
import torch

from titan_moe.runtime.device import refuse_unusable
from titan_moe.runtime.launch import count_gpus


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    refuse_unusable(count_gpus(os.environ))
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
