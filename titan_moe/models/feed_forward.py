"""The dense feed-forward, which shared experts are too."""

from torch import Tensor, nn

from titan_moe.ops.activation import SWIGLU, Activation
from titan_moe.ops.gated import activated


class FeedForward(nn.Module):
    """Dense feed-forward: w2 activation(w1 x, w3 x), without w3 if the activation is not gated.
    With `gated`, times sigmoid(gate x) per token, before w2, which is linear."""

    def __init__(
        self, dim: int, hidden_dim: int, activation: Activation = SWIGLU, *, gated: bool = False
    ) -> None:
        super().__init__()
        self.activation = activation
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False) if activation.gated else None
        self.gate = nn.Linear(dim, 1, bias=False) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x), None if self.w3 is None else self.w3(x)
        hidden = activated(gate, up, self.activation)
        return self.w2(hidden if self.gate is None else hidden * self.gate(x).sigmoid())
