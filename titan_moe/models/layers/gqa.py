"""Grouped-query attention."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.models.config import GQAConfig, PositionTemperature, RopeConfig
from titan_moe.models.layers.attention_core import AttentionCore
from titan_moe.models.layers.rope import Rotation, rotate, softmax_factor

# Of queries and keys, what tells them where in the row they are.
Placement = Callable[[Tensor, Tensor, Rotation], tuple[Tensor, Tensor]]


class GQA(nn.Module):
    """Queries in `num_heads` heads, keys and values in `num_kv_heads`; q and k may be normed.

    Args:
        rotary: whether positions rotate queries and keys; else `config.temperature` may scale them.
    """

    def __init__(
        self,
        dim: int,
        config: GQAConfig,
        rope: RopeConfig,
        *,
        norm_eps: float,
        core: AttentionCore,
        rotary: bool = True,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5 * softmax_factor(rope)
        self.core = core
        self.wq = nn.Linear(dim, config.num_heads * config.head_dim, bias=config.bias)
        self.wk = nn.Linear(dim, config.num_kv_heads * config.head_dim, bias=config.bias)
        self.wv = nn.Linear(dim, config.num_kv_heads * config.head_dim, bias=config.bias)
        self.wo = nn.Linear(config.num_heads * config.head_dim, dim, bias=config.bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm == "learned":
            self.q_norm = nn.RMSNorm(config.head_dim, eps=norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, eps=norm_eps)
        self.sinks = Sinks(config.num_heads) if config.sinks else None
        self.place = _placement(config, rope, norm_eps, rotary)

    def forward(self, x_BSD: Tensor, rotation: Rotation, mask: Any) -> Tensor:
        heads = (-1, self.head_dim)
        q_BSHC = self.q_norm(self.wq(x_BSD).unflatten(-1, heads))
        k_BSHC = self.k_norm(self.wk(x_BSD).unflatten(-1, heads))
        v_BSHC = self.wv(x_BSD).unflatten(-1, heads)
        q_BSHC, k_BSHC = self.place(q_BSHC, k_BSHC, rotation)
        q_BHSC, k_BHSC, v_BHSC = (x.transpose(1, 2) for x in (q_BSHC, k_BSHC, v_BSHC))
        sinks_H = None if self.sinks is None else self.sinks()
        o_BHSC = self.core(q_BHSC, k_BHSC, v_BHSC, mask, self.scale, sinks_H)
        return self.wo(o_BHSC.transpose(1, 2).flatten(2))


class Sinks(nn.Module):
    """A logit per head that joins each of its softmaxes: `weight` [H].

    A module, so that tensor parallelism can hand over a rank's heads.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads))

    def forward(self) -> Tensor:
        return self.weight


def _placement(config: GQAConfig, rope: RopeConfig, norm_eps: float, rotary: bool) -> Placement:
    if not rotary:
        if config.temperature is None:
            return lambda q_BSHC, k_BSHC, rotation: (q_BSHC, k_BSHC)
        return partial(_tempered, temperature=config.temperature)
    rotated = partial(_rotated, pairing=rope.pairing)
    if config.qk_norm == "unweighted":
        return partial(_normed, rotated=rotated, norm_eps=norm_eps)
    return rotated


def _rotated(
    q_BSHC: Tensor, k_BSHC: Tensor, rotation: Rotation, *, pairing: str
) -> tuple[Tensor, Tensor]:
    return rotate(q_BSHC, rotation, pairing), rotate(k_BSHC, rotation, pairing)


def _normed(
    q_BSHC: Tensor, k_BSHC: Tensor, rotation: Rotation, *, rotated: Placement, norm_eps: float
) -> tuple[Tensor, Tensor]:
    q_BSHC, k_BSHC = rotated(q_BSHC, k_BSHC, rotation)
    head_dim = q_BSHC.shape[-1:]
    return F.rms_norm(q_BSHC, head_dim, eps=norm_eps), F.rms_norm(k_BSHC, head_dim, eps=norm_eps)


def _tempered(
    q_BSHC: Tensor, k_BSHC: Tensor, rotation: Rotation, *, temperature: PositionTemperature
) -> tuple[Tensor, Tensor]:
    dtype = rotation.cos_BSC.dtype
    steps_BS = ((rotation.positions_BS + 1) // temperature.floor).to(dtype)
    scale_BS = 1 + temperature.scale * steps_BS.log1p()
    return (q_BSHC.to(dtype) * scale_BS[..., None, None]).to(q_BSHC.dtype), k_BSHC
