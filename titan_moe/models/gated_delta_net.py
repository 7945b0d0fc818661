"""Recurrent layers: Gated DeltaNet (arXiv 2412.06464) as in Qwen3-Next, and Kimi Delta Attention
(arXiv 2510.26692)."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.models.attention import Attention, PerHead
from titan_moe.models.recurrent_config import GatedDeltaConfig
from titan_moe.models.rope import Rotation
from titan_moe.ops.gated_delta import Recurrence
from titan_moe.ops.operation import at_least_float32


class GatedDeltaNet(Attention):
    """Keeps a state per head instead of keys and values of the past. Positions have no effect.

    Queries, keys and values are projected and pass a short convolution over their documents' last
    tokens. Two gates per head say how the state changes: it decays by
    exp(-exp(A_log) softplus(a x + dt_bias)), and is overwritten to the degree sigmoid(b x). What a
    query reads of it is normed in each head, multiplied by silu(z x), and projected.

    Kimi Delta Attention has a decay for each channel of a head's keys, multiplies by sigmoid(z x),
    and projects a and z through a few channels, `narrow`.

    `core` is a strategy, a Recurrence, which the layout of the tokens decides.
    """

    def __init__(
        self, dim: int, config: GatedDeltaConfig, *, norm_eps: float, core: Recurrence
    ) -> None:
        super().__init__()
        self.config = config
        self.core: Recurrence = core
        heads = config.num_value_heads
        keys, values = config.num_key_heads * config.key_dim, heads * config.value_dim
        widths = {"q": keys, "k": keys, "v": values}
        self.conv = convolutions(widths, config.conv_size)
        rank = config.gate_rank
        self.narrow = projections(dim, {} if rank is None else {"a": rank, "z": rank})
        gated, rates = (dim, heads) if rank is None else (rank, keys)
        self.in_proj = projections(dim, widths)
        self.in_proj["z"] = nn.Linear(gated, values, bias=False)
        self.gates = nn.ModuleDict(
            {"a": nn.Linear(gated, rates, bias=False), "b": nn.Linear(dim, heads, bias=False)}
        )
        self.decay = Decay(heads, rates)
        self.out_norm = nn.RMSNorm(config.value_dim, eps=norm_eps)
        self.out_proj = nn.Linear(values, dim, bias=False)

    def forward(
        self, x_BSD: Tensor, rotation: Rotation, mask: Tensor, counted_BS: Tensor | None = None
    ) -> Tensor:
        config, wide = self.config, at_least_float32(x_BSD)
        widths = ("q", config.key_dim), ("k", config.key_dim), ("v", config.value_dim)
        convolve = self.core.convolve
        mixed = [convolve(self.in_proj[x](x_BSD), self.conv[x](), mask) for x, _ in widths]
        q, k, v = (
            x.unflatten(-1, (-1, channels)).transpose(1, 2)
            for x, (_, channels) in zip(mixed, widths, strict=True)
        )
        a, z = (self.narrow[x](x_BSD) if self.narrow else x_BSD for x in ("a", "z"))
        decay = self.decay(self.gates["a"](a), wide, config.key_dim if self.narrow else None)
        beta_BSH = self.gates["b"](x_BSD).to(wide).sigmoid()
        rates = decay.transpose(1, 2), beta_BSH.transpose(1, 2)
        o_BHSV = self.attend(self.core, q, k, v, mask, *rates)
        o_BSHV = self.out_norm(o_BHSV.transpose(1, 2))
        z_BSHV = self.in_proj["z"](z).unflatten(-1, (-1, config.value_dim))
        opened_BSHV = z_BSHV.sigmoid() if self.narrow else F.silu(z_BSHV)
        return self.out_proj((o_BSHV * opened_BSHV).flatten(2))


def projections(dim: int, widths: Mapping[str, int]) -> nn.ModuleDict:
    """Returns Linear layers of one input, by name."""
    return nn.ModuleDict({x: nn.Linear(dim, width, bias=False) for x, width in widths.items()})


def convolutions(widths: Mapping[str, int], size: int) -> nn.ModuleDict:
    """Returns the weights of short convolutions over `size` tokens, by name."""
    return nn.ModuleDict({x: PerHead(width, 1, size) for x, width in widths.items()})


class Decay(nn.Module):
    """The logarithm of the factor that is left of a state: -exp(A_log) softplus(a + dt_bias).

    A module, so that its parameters can be wider than its layer's (`decoder.is_wide`): bfloat16
    changes the exponent of a large A_log by up to 1.6 %.
    """

    def __init__(self, heads: int, rates: int) -> None:
        super().__init__()
        self.A_log = PerHead(heads)
        self.dt_bias = PerHead(rates)

    def forward(self, a_BSR: Tensor, wide: torch.dtype, key_dim: int | None) -> Tensor:
        """Returns decay_BSH in the type `wide`; with a `key_dim` K that of a head's channels, which
        decay apart, [B, S, H, K]."""
        rates, scale = a_BSR.to(wide) + self.dt_bias().to(wide), self.A_log().to(wide)
        if key_dim is not None:
            rates, scale = rates.unflatten(-1, (-1, key_dim)), scale[:, None]
        return -scale.exp() * softplus(rates)


def softplus(rates: Tensor) -> Tensor:
    """Computes F.softplus, also in a graph."""
    if torch.compiler.is_compiling():
        # Flat, which copies a transposed gradient, such as torch 2.11 gives every graph. The
        # gradient of softplus would have its strides, but is traced with those of `rates`.
        return F.softplus(rates.flatten()).view_as(rates)
    return F.softplus(rates)
