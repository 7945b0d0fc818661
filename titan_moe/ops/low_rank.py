"""Low-rank adapters of Linear layers: two small matrices whose product is added to a weight (arXiv
2106.09685)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Adapter(nn.Module):
    """Holds the weights of a Linear layer's adapter: a [r, I] and b [O, r]."""

    def __init__(self, rank: int, inputs: int, outputs: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.a = nn.Parameter(torch.empty(rank, inputs))
        self.b = nn.Parameter(torch.empty(outputs, rank))

    def extra_repr(self) -> str:
        return f"rank={self.a.shape[0]}, scale={self.scale:g}"


class AdaptedLinear(nn.Module):
    """A Linear layer with an adapter, whose parameters keep their names: W x + scale B (A x)."""

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, adapter: Adapter) -> None:
        super().__init__()
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.adapter = adapter

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y + low_rank(x, self.adapter.a, self.adapter.b, self.adapter.scale)


def low_rank(x: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """Computes scale * B (A x): [..., O] from x [..., I]."""
    return F.linear(F.linear(x, a_RI) * scale, b_OR)
