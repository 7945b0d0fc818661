"""The statistics of the noise band, on curves whose noise is known."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from titan_moe.config.errors import ConfigError
from titan_moe.verify.compare.noise.band import Band, quantities_of, student_t
from titan_moe.verify.compare.noise.fit import Gradients
from titan_moe.verify.compare.records import RunRecord, gradients

STEPS = 24
BOTH = ("loss", "grad_norm")
ALL = (*BOTH, "load of layers.1", "load of layers.2")
NOTHING: Any = ({}, [], {}, {})
Noise = Callable[[np.random.Generator, int], np.ndarray]


def white(rng: np.random.Generator, number: int) -> np.ndarray:
    return 1e-3 * rng.normal(size=(number, 2, STEPS))


def drifting(rng: np.random.Generator, number: int) -> np.ndarray:
    walk = 1e-4 * rng.normal(size=(number, 2, STEPS)).cumsum(-1)
    return walk + 3e-4 * rng.normal(size=(number, 2, STEPS))


def flipping(rng: np.random.Generator, number: int) -> np.ndarray:
    """Growing noise; three curves in ten take another path at some step, as when a token goes to
    another expert."""
    noise = 1e-6 * np.exp(np.arange(STEPS) / 8) * rng.normal(size=(number, 2, STEPS))
    for curve in noise[rng.random(number) < 0.3]:
        curve[:, rng.integers(STEPS) :] += 1e-4 * rng.normal()
    return noise


def curves(noise: np.ndarray) -> list[RunRecord]:
    """Noise on the logarithms of two falling curves."""
    falling = np.stack([6 * np.exp(-np.arange(STEPS) / 20), 3 / (1 + np.arange(STEPS))])
    return [
        RunRecord(f"curve {i}", range(1, STEPS + 1), dict(zip(BOTH, pair, strict=True)), *NOTHING)
        for i, pair in enumerate(falling * np.exp(noise))
    ]


def share_outside(noise: Noise, controls: int, shift: float = 0.0, bands: int = 25) -> float:
    """The share of 20 curves for each of several bands."""
    rng = np.random.default_rng(controls)
    outside = 0
    for _ in range(bands):
        band = Band(curves(noise(rng, controls)), BOTH)
        outside += sum(
            band.check(curve).first is not None for curve in curves(noise(rng, 20) + shift)
        )
    return outside / (20 * bands)


@pytest.mark.parametrize("controls", [8, 32])
@pytest.mark.parametrize("noise", [white, drifting, flipping])
def test_correct_curves_are_outside_as_seldom_as_stated(noise: Noise, controls: int):
    """Stated: 1e-4. Of 3000 curves against 60 bands 1 was outside."""
    assert share_outside(noise, controls, bands=10) <= 0.005


@pytest.mark.parametrize(("shift", "least"), [(1e-3, 0.05), (2e-3, 0.7), (3e-3, 0.99)])
def test_shifts_of_one_two_and_three_deviations_are_seen(shift: float, least: float):
    assert share_outside(white, 16, shift) >= least


def test_means_over_steps_see_what_no_step_shows():
    rng = np.random.default_rng(3)
    band = Band(curves(white(rng, 16)), BOTH)
    found = band.check(curves(white(rng, 1) + 2.5e-3)[0])
    assert found.first is not None and found.first.mean_over > 1
    low, high = band.edges("loss")
    (candidate,) = curves(white(np.random.default_rng(4), 1) + 2.5e-3)
    loss = band.values(candidate, "loss")
    assert (low < loss).all() and (loss < high).all()


def test_too_few_or_infinite_control_runs_make_no_band():
    good = curves(white(np.random.default_rng(8), 6))
    with pytest.raises(ConfigError, match="3 control runs"):
        Band(good[:4], BOTH)
    with pytest.raises(ConfigError, match="curve 0: loss is not finite"):
        Band([replace(good[0], scalars={"loss": np.full(STEPS, math.nan)}), *good[1:]], BOTH)


@pytest.mark.parametrize(
    ("degrees", "value"), [(1, 31.821), (2, 6.965), (3, 4.541), (4, 3.747), (7, 2.998), (19, 2.539)]
)
def test_quantiles_of_students_t_are_those_of_the_tables(degrees: int, value: float):
    assert student_t(0.01, degrees) == pytest.approx(value, abs=5e-4)


def load_curves(rng: np.random.Generator, number: int, flips: float = 1.0) -> list[RunRecord]:
    """Two layers of 8 experts and 512 rows, of which a few go elsewhere in each curve and step."""
    found = []
    for curve in curves(white(rng, number)):
        counts = np.full((2, STEPS, 8), 64) + np.arange(-4, 4)
        for layer_SE in counts:
            for row_E in layer_SE:
                np.add.at(row_E, rng.integers(0, 8, size=rng.poisson(flips)), 1)
                np.add.at(row_E, rng.integers(0, 8, size=rng.poisson(flips)), -1)
        found.append(replace(curve, loads={"layers.1": counts[0], "layers.2": counts[1]}))
    return found


def test_band_compares_expert_loads():
    rng = np.random.default_rng(10)
    band = Band(load_curves(rng, 16), ALL)
    assert band.quantities == ALL and set(band.bounds) == {*BOTH, "load"}
    assert all(band.check(curve).first is None for curve in load_curves(rng, 20))

    (moved,) = load_curves(rng, 1)
    moved.loads["layers.2"][9:, 0] += 20
    moved.loads["layers.2"][9:, 5] -= 20
    found = band.check(moved)
    assert (found.first.quantity, found.first.step) == ("load of layers.2", 10)
    share = band.values(moved, "load of layers.2")
    assert share[9:].min() > 18 / 512 > share[:9].max()
    assert band.location("load of layers.2").max() < 18 / 512
    with pytest.raises(ConfigError, match="not every layer has 8 experts"):
        fewer = {layer: rows_SE[:, :4] for layer, rows_SE in moved.loads.items()}
        band.check(replace(moved, loads=fewer))


def test_one_row_more_than_equal_loads_is_no_difference():
    rng = np.random.default_rng(12)
    band = Band(load_curves(rng, 8, flips=0), ALL)
    one, many = load_curves(rng, 2, flips=0)
    one.loads["layers.1"][8] += np.array([1, -1, 0, 0, 0, 0, 0, 0])
    many.loads["layers.1"][8] += np.array([20, -20, 0, 0, 0, 0, 0, 0])
    assert band.check(one).first is None
    assert band.check(many).first.quantity == "load of layers.1"


NORMS = {
    "layers.1.attention.wo.weight": [2.0],
    "layers.1.moe.experts.w1": [0.0, 0.1, 0.2, 0.4],
    "layers.1.moe.experts.w2": [0.0, 0.2, 0.4, 0.8],
    "layers.1.moe.shared_experts.w1.weight": [0.5],
    "output.weight": [1.0],
}
"""The first expert has no rows."""


def gradient_curves(
    rng: np.random.Generator, number: int, expert: float = 1.0, shared: float = 1.0
) -> list[RunRecord]:
    """Norms of 1 % noise; those of the last expert and of the shared one are multiplied."""
    factors = {name: np.ones(len(norms)) for name, norms in NORMS.items()}
    for name in ("layers.1.moe.experts.w1", "layers.1.moe.experts.w2"):
        factors[name][3] = expert
    factors["layers.1.moe.shared_experts.w1.weight"][0] = shared
    found = []
    for curve in curves(white(rng, number)):
        lines = [
            {
                name: list(factors[name] * norms * np.exp(1e-2 * rng.normal(size=len(norms))))
                for name, norms in NORMS.items()
            }
            for _ in range(STEPS)
        ]
        found.append(replace(curve, scalars={**curve.scalars, **gradients(lines)}))
    return found


def test_band_compares_gradients_of_experts_shared_experts_and_layers():
    rng = np.random.default_rng(14)
    controls = gradient_curves(rng, 16)
    band = Band(controls, quantities_of(controls[0]))
    experts = [f"gradient of layers.1 expert {number}" for number in range(4)]
    shared = "gradient of layers.1 shared experts"
    others = ["gradient of layers.1", shared, "gradient of output.weight"]
    assert {*band.quantities} == {*BOTH, *experts, *others}
    assert set(band.bounds) == {*BOTH, "gradient"}
    assert all(band.check(curve).first is None for curve in gradient_curves(rng, 20))
    (halved,), (dropped,) = gradient_curves(rng, 1, 0.5), gradient_curves(rng, 1, shared=0.0)
    for curve, quantity in ((halved, experts[3]), (dropped, shared)):
        found = band.check(curve)
        assert found.first is not None and found.first.quantity == quantity
        assert found.first.step == 1 and np.isfinite(found.statistic)


def test_an_expert_without_rows_has_a_multiple_of_its_layers_mean_norm():
    (curve,) = gradient_curves(np.random.default_rng(15), 1)
    idle, busy = (curve.scalars[f"gradient of layers.1 expert {number}"] for number in (0, 3))
    mean = 4 * math.sqrt(5 * (0.01 + 0.04 + 0.16) / 4)
    np.testing.assert_allclose(idle, mean, rtol=0.05)
    np.testing.assert_allclose(busy, mean + math.sqrt(0.8), rtol=0.05)


@pytest.mark.parametrize(("last", "ahead"), [(0, 2), (9, 9), (STEPS, 16)])
def test_gradients_look_as_far_ahead_as_runs_take_to_part(last: int, ahead: int):
    runs_NQES = 1e-2 * np.random.default_rng(17).normal(size=(9, 3, 1, STEPS))
    runs_NQES[:4] = np.median(runs_NQES, 0)
    runs_NQES[:4, ..., last:] += 1.0
    assert Gradients(runs_NQES, 1e-6).ahead == ahead


def test_curves_without_gradients_are_compared_without_them():
    rng = np.random.default_rng(16)
    old, (new,) = curves(white(rng, 8)), gradient_curves(rng, 1, 0.5)
    band = Band(old, quantities_of(new))
    assert band.quantities == BOTH and band.check(new).first is None
