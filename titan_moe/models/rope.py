"""Rotary position embeddings with the families' scaling variants."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from titan_moe.models.config import AttentionConfig, Llama3Scaling, RopeConfig, YarnScaling
from titan_moe.ops import rotate as ops


class Rotation(NamedTuple):
    """Cosines and sines of each position's angles, and the positions."""

    cos_BSC: Tensor
    sin_BSC: Tensor
    positions_BS: Tensor


RopeKey = tuple[int, RopeConfig | None]
"""The arguments of a Rope."""


def rope_key(attention: AttentionConfig) -> RopeKey:
    """Returns what decides a layer's angles. Layers without positions have none of them."""
    return (attention.rope_dim, attention.rope) if attention.rope else (0, None)


class Rope(nn.Module):
    """Computes angles of positions: C = dim / 2 of them for `dim` rotated channels."""

    inverse_frequency: Tensor

    def __init__(self, dim: int, config: RopeConfig | None) -> None:
        super().__init__()
        self.key = dim, config
        empty = torch.empty(dim // 2, dtype=torch.float64)
        self.register_buffer("inverse_frequency", empty, persistent=False)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Computes frequencies; also called after the module leaves the meta device."""
        if not self.inverse_frequency.is_meta:
            self.inverse_frequency.copy_(inverse_frequencies(*self.key))

    def forward(self, positions_BS: Tensor, dtype: torch.dtype) -> Rotation:
        """Angles in float64, cosines and sines in at least float32 of the compute `dtype`."""
        angles_BSC = positions_BS[..., None].double() * self.inverse_frequency
        scale = attention_factor(self.key[1])
        dtype = torch.promote_types(dtype, torch.float32)
        return Rotation(
            (angles_BSC.cos() * scale).to(dtype), (angles_BSC.sin() * scale).to(dtype), positions_BS
        )


def rotate(x_BSHC: Tensor, rotation: Rotation, pairing: str, first: int = 0) -> Tensor:
    """Rotates pairs of channels by their position's angle, as ops/rotate.py does."""
    return ops.rotate(x_BSHC, rotation.cos_BSC, rotation.sin_BSC, pairing, first)


def inverse_frequencies(dim: int, config: RopeConfig | None) -> Tensor:
    """theta^(-2i/dim), rescaled as the config says: [dim / 2], float64."""
    if config is None:
        return torch.empty(0, dtype=torch.float64)
    base_C = config.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    match config.scaling:
        case YarnScaling():
            return _yarn(base_C, dim, config.theta, config.scaling)
        case Llama3Scaling():
            return _llama3(base_C, config.scaling)
    return base_C * (torch.arange(dim // 2) < int(config.share * dim) // 2)


def _yarn(base_C: Tensor, dim: int, theta: float, scaling: YarnScaling) -> Tensor:
    """Interpolate slow channels, keep fast ones, blend between (arXiv 2309.00071, 3.2)."""

    def channel_of(rotations: float) -> float:
        wavelength = scaling.original_max_seq_len / (rotations * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = channel_of(scaling.beta_fast), channel_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = max(high - low, 0.001)
    channel_C = torch.arange(dim // 2, dtype=torch.float64)
    interpolated_C = ((channel_C - low) / width).clamp(0, 1)
    return base_C / scaling.factor * interpolated_C + base_C * (1 - interpolated_C)


def _llama3(base_C: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns_C = scaling.original_max_seq_len * base_C / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept_C = ((turns_C - scaling.low_freq_factor) / span).clamp(0, 1)
    return base_C / scaling.factor * (1 - kept_C) + base_C * kept_C


def attention_factor(config: RopeConfig | None) -> float:
    """Returns the factor of cosines and sines under YaRN; 1 without YaRN."""
    if config is None or not isinstance(yarn := config.scaling, YarnScaling):
        return 1.0
    return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)


def softmax_factor(config: RopeConfig | None) -> float:
    """Returns DeepSeek's factor of the attention's softmax scale under YaRN; 1 without YaRN."""
    if config is None or not isinstance(yarn := config.scaling, YarnScaling):
        return 1.0
    return _mscale(yarn.factor, yarn.mscale_all_dim) ** 2


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
