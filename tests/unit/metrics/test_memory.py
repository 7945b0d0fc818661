"""Process memory follows a large allocation."""

import torch

from titan_moe.metrics.memory import memory_metrics


def test_resident_memory_follows_an_allocation():
    before = memory_metrics(torch.device("cpu"))
    block = torch.ones(2**28 // 4)
    during = memory_metrics(torch.device("cpu"))
    assert 0.2 < during["memory/resident_gib"] - before["memory/resident_gib"] < 0.3
    assert during["memory/peak_gib"] >= during["memory/resident_gib"] * 0.99
    del block
    after = memory_metrics(torch.device("cpu"))
    assert after["memory/resident_gib"] < during["memory/resident_gib"] - 0.2
    assert after["memory/peak_gib"] >= during["memory/peak_gib"]
