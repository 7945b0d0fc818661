"""The statistics of the noise band, on curves whose noise is known."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from titan_moe.verify.noise_band import Band, student_t
from titan_moe.verify.records import Curve

STEPS = 24
Noise = Callable[[np.random.Generator, int], np.ndarray]


def white(rng: np.random.Generator, number: int) -> np.ndarray:
    return 1e-3 * rng.normal(size=(number, 2, STEPS))


def drifting(rng: np.random.Generator, number: int) -> np.ndarray:
    walk = 1e-4 * rng.normal(size=(number, 2, STEPS)).cumsum(-1)
    return walk + 3e-4 * rng.normal(size=(number, 2, STEPS))


def heavy(rng: np.random.Generator, number: int) -> np.ndarray:
    return 1e-3 * rng.standard_t(3, size=(number, 2, STEPS))


def flipping(rng: np.random.Generator, number: int) -> np.ndarray:
    """Growing noise; three curves in ten take another path at some step, as when a token goes to
    another expert."""
    noise = 1e-6 * np.exp(np.arange(STEPS) / 8) * rng.normal(size=(number, 2, STEPS))
    for curve in noise[rng.random(number) < 0.3]:
        curve[:, rng.integers(STEPS) :] += 1e-4 * rng.normal()
    return noise


def curves(noise: np.ndarray) -> list[Curve]:
    """Noise on the logarithms of two falling curves."""
    falling = np.stack([6 * np.exp(-np.arange(STEPS) / 20), 3 / (1 + np.arange(STEPS))])
    return [
        Curve(
            f"curve {i}",
            range(1, STEPS + 1),
            dict(zip(("loss", "grad_norm"), falling * np.exp(one), strict=True)),
        )
        for i, one in enumerate(noise)
    ]


def share_outside(noise: Noise, repeats: int, shift: float = 0.0, bands: int = 25) -> float:
    """Of 20 curves for each of several bands."""
    rng = np.random.default_rng(repeats)
    outside = 0
    for _ in range(bands):
        band = Band(curves(noise(rng, repeats)))
        outside += sum(not band.judge(curve).inside for curve in curves(noise(rng, 20) + shift))
    return outside / (20 * bands)


@pytest.mark.parametrize("repeats", [8, 16])
@pytest.mark.parametrize("noise", [white, drifting, heavy, flipping])
def test_harmless_curves_are_outside_as_seldom_as_stated(noise: Noise, repeats: int):
    share = share_outside(noise, repeats)
    assert share <= 1 / (repeats + 1)
    if noise in (white, drifting):
        assert share <= 0.03  # Stated: 1 %. The 25 bands are of a few repeats each.


def test_without_the_repeats_own_limit_there_would_be_more():
    """The rule is what keeps the rate: with a textbook's 3 spreads most curves are outside."""
    rng = np.random.default_rng(0)
    band = Band(curves(white(rng, 12)))
    band.limit = 3.0 / band.bounds["loss"]
    assert np.mean([not band.judge(curve).inside for curve in curves(white(rng, 40))]) > 0.5


@pytest.mark.parametrize(("shift", "least"), [(1e-3, 0.05), (2e-3, 0.7), (3e-3, 0.99)])
def test_shifts_of_one_two_and_three_deviations_are_seen(shift: float, least: float):
    assert share_outside(white, 16, shift) >= least


def test_means_over_steps_see_what_no_step_shows():
    rng = np.random.default_rng(3)
    band = Band(curves(white(rng, 16)))
    judgement = band.judge(curves(white(rng, 1) + 2.5e-3)[0])
    assert not judgement.inside and judgement.mean_over > 1
    low, high = band.edges("loss")
    (candidate,) = curves(white(np.random.default_rng(4), 1) + 2.5e-3)
    loss = band.values(candidate, "loss")
    assert (low < loss).all() and (loss < high).all()


def test_the_first_step_outside_and_its_quantity_are_named():
    rng = np.random.default_rng(5)
    band = Band(curves(drifting(rng, 12)))
    noise = drifting(rng, 1)
    noise[0, 1, 10:] += 0.05
    judgement = band.judge(curves(noise)[0])
    assert judgement.first_outside == 11 and judgement.quantity == "grad_norm"
    assert judgement.mean_over == 1 and judgement.repeats_as_far == 0
    assert "outside from step 11 on, by grad_norm" in judgement.line()
    assert band.judge(curves(drifting(rng, 1))[0]).line().endswith("inside")


def test_the_band_widens_with_the_noise():
    band = Band(curves(flipping(np.random.default_rng(6), 12)))
    low, high = band.edges("grad_norm")
    width = np.log(high / low)
    assert width[-1] > 3 * width[0]
    assert (low < band.location("grad_norm")).all() and (band.location("grad_norm") < high).all()


def test_what_is_not_finite_is_outside_from_there_on():
    rng = np.random.default_rng(7)
    band = Band(curves(white(rng, 8)))
    (curve,) = curves(white(rng, 1))
    curve.scalars["loss"][6:] = math.nan
    judgement = band.judge(curve)
    assert judgement.first_outside == 7 and judgement.quantity == "loss"
    assert judgement.statistic == math.inf


def test_equal_repeats_know_no_more_than_float32():
    band = Band(curves(np.zeros((6, 2, STEPS))))
    offsets = np.array([0, 1e-6, 1e-4])[:, None, None] * np.ones((1, 2, STEPS))
    assert [band.judge(curve).inside for curve in curves(offsets)] == [True, True, False]


def test_what_is_no_band_is_refused():
    good = curves(white(np.random.default_rng(8), 6))
    with pytest.raises(ValueError, match="3 repeats"):
        Band(good[:3])
    with pytest.raises(ValueError, match="the repeat curve 0: loss is not finite"):
        Band([replace(good[0], scalars={"loss": np.full(STEPS, math.nan)}), *good[1:]])
    with pytest.raises(ValueError, match="has 5 steps, the band 24"):
        Band(good).judge(Curve("short", range(5), {"loss": np.ones(5)}))


@pytest.mark.parametrize(("degrees", "value"), [(3, 4.541), (7, 2.998), (19, 2.539)])
def test_quantiles_of_students_t_are_those_of_the_tables(degrees: int, value: float):
    assert student_t(0.01, degrees) == pytest.approx(value, rel=0.02)


def test_what_is_written_is_json():
    rng = np.random.default_rng(9)
    band, (outside,) = Band(curves(drifting(rng, 8))), curves(drifting(rng, 1) + 0.1)
    text = json.dumps([band.as_json(), band.judge(outside).as_json()])
    assert json.loads(text)[0]["false_alarms"] == {"if_log_normal": 1e-4, "at_most": 1 / 9}
