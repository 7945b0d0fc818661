"""Rotations against complex multiplication, scalings against their definitions."""

import math

import pytest
import torch

from tests.support.rotate_cases import turned
from titan_moe.models import rope as rope_module
from titan_moe.models.config import Llama3Scaling, RopeConfig, YarnScaling
from titan_moe.models.rope import Rope, inverse_frequencies, rotate, softmax_factor


@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
def test_rotation_is_complex_multiplication_of_the_pairs(pairing: str):
    rope = Rope(8, RopeConfig(100.0, pairing))
    x_BSHC = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    positions_BS = torch.tensor([[0, 1, 2, 3, 4], [7, 0, 3, 3, 1]])
    out = rotate(x_BSHC, rope(positions_BS, torch.float64), pairing)
    frequencies_C = torch.tensor([100.0 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    angles_BSC = positions_BS[..., None] * frequencies_C
    torch.testing.assert_close(out, turned(x_BSHC, angles_BSC, pairing, 0))


def test_yarn_keeps_fast_channels_and_interpolates_slow_ones():
    plain = inverse_frequencies(64, RopeConfig(10_000.0))
    yarn = YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
    ratio = inverse_frequencies(64, RopeConfig(10_000.0, scaling=yarn)) / plain
    wavelengths = 2 * math.pi / plain
    assert (ratio[4096 / wavelengths > 32 * 1.5] == 1).all()
    torch.testing.assert_close(ratio[-1].item(), 1 / 40)
    assert (ratio.diff() <= 1e-15).all()
    # DeepSeek's numbers: 0.1 * 0.707 * ln 40 + 1, squared on the softmax scale; none on cos and
    # sin.
    config = RopeConfig(10_000.0, scaling=yarn)
    assert softmax_factor(config) == pytest.approx(1.2608**2, rel=1e-4)
    assert rope_module.attention_factor(config) == 1.0


def test_llama3_scaling_keeps_blends_and_divides_by_band():
    scaling = Llama3Scaling(8.0, 8192)
    plain = inverse_frequencies(128, RopeConfig(500_000.0))
    scaled = inverse_frequencies(128, RopeConfig(500_000.0, scaling=scaling))
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            assert after == before
        elif wavelength > 8192:
            assert after == pytest.approx(before / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            assert after == pytest.approx((1 - smooth) * before / 8 + smooth * before)
