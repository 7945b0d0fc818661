"""Recurrent layers of Mamba-2 (arXiv 2405.21060), as in Nemotron-H."""

from torch import Tensor, nn

from titan_moe.models.attention import Attention, PerHead
from titan_moe.models.gated_delta_net import convolutions, projections, softplus
from titan_moe.models.recurrent_config import Mamba2Config
from titan_moe.models.rope import Rotation
from titan_moe.ops.gated_delta import Recurrence
from titan_moe.ops.operation import at_least_float32
from titan_moe.ops.recomputed import gated_norm


class Mamba2(Attention):
    """Keeps a state per head instead of keys and values of the past. Positions have no effect.

    x (values), B (keys) and C (queries) are projected and pass a short convolution over their
    documents' last tokens. A head's state decays by exp(-exp(A_log) dt), and dt B x^T is added to
    it; C reads it, D x is added. The result, times silu(z), is normed in each group, and projected.

    `core` is a strategy, a Recurrence, which the layout of the tokens decides.
    """

    def __init__(
        self, dim: int, config: Mamba2Config, *, norm_eps: float, core: Recurrence
    ) -> None:
        super().__init__()
        self.config = config
        self.core: Recurrence = core
        heads = config.num_value_heads
        keys, values = config.num_key_heads * config.key_dim, heads * config.value_dim
        widths = {"q": keys, "k": keys, "v": values}
        self.in_proj = projections(dim, widths | {"z": values})
        self.gates = projections(dim, {"dt": heads})
        self.conv = convolutions(widths, config.conv_size)
        biased = widths if config.conv_bias else {}
        self.conv_bias = nn.ModuleDict({x: PerHead(width) for x, width in biased.items()})
        self.decay = TimeStep(config)
        self.out_norm = GatedNorm(values, values // config.num_key_heads, norm_eps)
        self.out_proj = nn.Linear(values, dim, bias=False)

    def forward(
        self, x_BSD: Tensor, rotation: Rotation, mask: Tensor, counted_BS: Tensor | None = None
    ) -> Tensor:
        widths = {"q": self.config.key_dim, "k": self.config.key_dim, "v": self.config.value_dim}
        q, k, v = (
            self._convolved(name, x_BSD, mask).unflatten(-1, (-1, channels))
            for name, channels in widths.items()
        )
        rates_BSH, decay_BSH, skip_H = self.decay(self.gates["dt"](x_BSD))
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        rates = decay_BSH.transpose(1, 2), rates_BSH.transpose(1, 2)
        o_BHSV = self.attend(self.core, *heads_first, mask, *rates, False)
        beside = {"v_BSHV": v, "d_H": skip_H, "z_BSD": self.in_proj["z"](x_BSD)}
        return self.out_proj(self.out_norm(o_BHSV.transpose(1, 2), **beside))

    def _convolved(self, name: str, x_BSD: Tensor, mask: Tensor) -> Tensor:
        bias = (self.conv_bias[name](),) if self.conv_bias else ()
        return self.core.convolve(self.in_proj[name](x_BSD), self.conv[name](), mask, *bias)


class TimeStep(nn.Module):
    """A head's time step dt, the logarithm of the factor that is left of its state, and D.

    A module, so that its parameters can be wider than its layer's (`decoder.is_wide`).
    """

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.least = config.time_step_min
        self.A_log = PerHead(config.num_value_heads)
        self.dt_bias = PerHead(config.num_value_heads)
        self.D = PerHead(config.num_value_heads)

    def forward(self, dt_BSH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dt_BSH, decay_BSH and D_H, in at least float32. D_H is a copy, which stays when
        FSDP frees the parameter."""
        wide = at_least_float32(dt_BSH)
        rates_BSH = softplus(dt_BSH.to(wide) + self.dt_bias().to(wide)).clamp_min(self.least)
        decay_BSH = -self.A_log().to(wide).exp() * rates_BSH
        return rates_BSH, decay_BSH, self.D().to(wide, copy=True)


class GatedNorm(nn.Module):
    """`ops.recomputed.gated_norm`, with a weight for each channel: a `PerHead`, since tensor
    parallelism cuts groups over ranks."""

    def __init__(self, channels: int, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.scale = PerHead(channels)

    def forward(self, o_BSHV: Tensor, *, v_BSHV: Tensor, d_H: Tensor, z_BSD: Tensor) -> Tensor:
        """Takes by keyword what hooks do not record: they see one input."""
        return gated_norm(o_BSHV, v_BSHV, d_H, z_BSD, self.scale(), self.size, self.eps)
