"""Device metrics and expert load against hand-computed values."""

import math

import pytest
import torch

from titan_moe.metrics.step_metrics import DeviceMetric, DeviceMetrics, expert_load

CASES = {
    "even": ([6, 6, 6, 6], {"max_over_mean": 1, "cv": 0, "entropy": 1, "dead": 0}),
    "collapsed": ([8, 0, 0, 0], {"max_over_mean": 4, "cv": math.sqrt(3), "entropy": 0, "dead": 3}),
    "half dead": ([5, 5, 0, 0], {"max_over_mean": 2, "cv": 1, "entropy": 0.5, "dead": 2}),
    # Shares 1/2, 1/4, 1/8, 1/8: 1.75 bits of 2.
    "uneven": (
        [4, 2, 1, 1],
        {"max_over_mean": 2, "cv": math.sqrt(1.5) / 2, "entropy": 0.875, "dead": 0},
    ),
    "no rows": ([0, 0, 0, 0], {"max_over_mean": 0, "cv": 0, "entropy": 0, "dead": 4}),
}


def test_every_layer_under_its_own_name():
    counts_LE = torch.tensor([counts for counts, _ in CASES.values()])
    layers = ["layers.1", "layers.3", "layers.4", "layers.10", "mtp.layers.0"]
    actual = expert_load(counts_LE, layers)
    expected = {
        f"moe/{layer}/{name}": value
        for layer, (_, figures) in zip(layers, CASES.values(), strict=True)
        for name, value in figures.items()
    }
    assert actual == pytest.approx(expected, abs=1e-12)
    assert all(type(value) is float for value in actual.values())


def test_counts_beyond_float32_stay_exact():
    big = 2**40
    figures = expert_load(torch.tensor([[big + 1, big - 1]]), ["layers.0"])
    assert figures["moe/layers.0/max_over_mean"] == 1 + 2**-40


def test_device_metrics_of_two_ranks():
    first, second, sent, bound = (torch.zeros((), dtype=torch.float64) for _ in range(4))
    metrics = DeviceMetrics(
        [
            DeviceMetric("per target", [first, second]),
            DeviceMetric("ratio", [sent], per=[bound]),
            DeviceMetric("of other ranks", []),
            DeviceMetric("of no rank", [], logged=False),
        ],
        device=torch.device("cpu"),
    )
    for tensor, value in ((first, 1.0), (second, 2.0), (sent, 3.0), (bound, 2.0)):
        tensor.fill_(value)
    sums = {name: 2 * term.item() for name, term in metrics.terms().items()}
    found = metrics.values(sums, num_targets=4)
    assert found == {"per target": 1.5, "ratio": 1.5, "of other ranks": 0.0}
    metrics.reset()
    assert not any(term.item() for term in metrics.terms().values())
    nothing = metrics.values(dict.fromkeys(sums, 0.0), num_targets=0)
    assert nothing == {"per target": 0.0, "of other ranks": 0.0}, "a ratio of nothing is left out"
