"""Residual connections of one stream or several (manifold-constrained hyper-connections, arXiv
2512.24880). Several streams of a token lie beside each other in its channels: [B, S, N D]."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.models.config import ModelConfig
from titan_moe.ops.operation import at_least_float32


class Residual(nn.Module):
    """Adds a sublayer's output to its input."""

    def forward(self, x_BSD: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x_BSD + sublayer(x_BSD)


class Collapse(nn.Module):
    """Makes one stream of all: the sum of each times a gate, which depends on all of them. The
    gates are the first of several groups of numbers, in at least float32.

    Parameters: `weight` projects the normed streams to the numbers, `scale` multiplies those of
    each group, and `bias` is added.
    """

    def __init__(self, config: ModelConfig, *further: int) -> None:
        super().__init__()
        self.num = config.streams
        self.sizes = sizes = (config.streams, *further)
        self.eps, self.norm_eps = config.streams_eps, config.norm_eps
        self.weight = nn.Parameter(torch.empty(sum(sizes), config.streams * config.dim))
        self.bias = nn.Parameter(torch.empty(sum(sizes)))
        self.scale = nn.Parameter(torch.empty(len(sizes)))

    def numbers(self, x_BSE: Tensor) -> list[Tensor]:
        """Returns the numbers by group, [B, S, size] each."""
        wide = at_least_float32(x_BSE)
        normed = F.rms_norm(x_BSE.to(wide), x_BSE.shape[-1:], None, self.norm_eps)
        groups = F.linear(normed, self.weight.to(wide)).split(self.sizes, -1)
        scales, biases = self.scale.to(wide).unbind(), self.bias.to(wide).split(self.sizes)
        return [x * scale + bias for x, scale, bias in zip(groups, scales, biases, strict=True)]

    def forward(self, x_BSE: Tensor) -> Tensor:
        return self.collapsed(self.numbers(x_BSE)[0], x_BSE)

    def collapsed(self, logits_BSN: Tensor, x_BSE: Tensor) -> Tensor:
        """Returns the sum of the streams, each times its gate: [B, S, D]."""
        gates_BSN = logits_BSN.sigmoid() + self.eps
        streams_BSND = x_BSE.unflatten(-1, (self.num, -1))
        return (gates_BSN[..., None] * streams_BSND).sum(2).to(x_BSE.dtype)


class CollapsedNorm(nn.RMSNorm):
    """The final norm, of one stream that all are made into."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.dim, eps=config.norm_eps)
        self.streams = Collapse(config)

    def forward(self, x_BSE: Tensor) -> Tensor:
        return super().forward(self.streams(x_BSE))


class HyperConnection(Collapse):
    """Makes a sublayer's input from the streams, mixes the streams by a doubly stochastic matrix,
    and adds the sublayer's output to each, times a number of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.streams, config.streams**2)
        self.steps = config.sinkhorn_steps

    def forward(  # type: ignore[override]
        self, x_BSE: Tensor, sublayer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        into_BSN, out_BSN, mix = self.numbers(x_BSE)
        y_BSD = sublayer(self.collapsed(into_BSN, x_BSE))
        streams_BSND = x_BSE.unflatten(-1, (self.num, -1))
        mix_BSNN = doubly_stochastic(mix.unflatten(-1, (self.num, -1)), self.steps, self.eps)
        mixed_BSND = mix_BSNN.to(x_BSE.dtype).mT @ streams_BSND
        shares_BSN = 2 * out_BSN.sigmoid().to(x_BSE.dtype)
        added_BSND = shares_BSN[..., None] * y_BSD[:, :, None]
        return mixed_BSND.flatten(2) + added_BSND.flatten(2)  # No view, which FSDP warns of.


def doubly_stochastic(logits_BSNN: Tensor, steps: int, eps: float) -> Tensor:
    """Returns matrices whose rows and columns nearly add up to 1: a softmax of rows, then divisions
    by the sums of columns and rows in turn. Columns are first and last (Sinkhorn)."""
    mix = logits_BSNN.softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(steps - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix
