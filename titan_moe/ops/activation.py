"""Describes the functions between the projections of a feed-forward. No torch here: checks and
planners read it."""

from dataclasses import dataclass, fields, replace
from typing import Literal


@dataclass(frozen=True)
class Activation:
    """Rows before a feed-forward's last projection: function(gate) * (up + up_shift), or
    function(gate) alone. The default is SwiGLU (arXiv 2002.05202)."""

    function: Literal["silu", "gelu_tanh", "relu2", "situ"] = "silu"
    """x sigmoid(slope x); GELU by its formula with tanh; relu(x)^2; or 4 tanh(x / 4) sigmoid(x),
    whose factor is 25 tanh(up / 25) (Kimi-K3)."""
    gated: bool = True
    """w1 makes the gate and w3 up. False: there is no w3, and a second factor neither."""
    slope: float = 1.0
    limit: float | None = None
    """Bound of the gate from above, and of up on both sides."""
    clamps: Literal["before", "after"] = "before"
    """The limit bounds the gate before the function, or the function's result."""
    up_shift: float = 0.0
    limited_in: tuple[int, ...] | None = None
    """Layers that have the limit; None: all."""

    def of(self, layer: int) -> "Activation":
        """Returns the activation of one layer; -1: of one that `limited_in` does not name."""
        if self.limited_in is None or layer in self.limited_in:
            return replace(self, limited_in=None)
        return replace(self, limit=None, clamps="before", limited_in=None)

    def __str__(self) -> str:
        more = [f for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return " ".join([self.function, *(f"{f.name}={getattr(self, f.name)}" for f in more)])


SWIGLU = Activation()
CLAMPED_SWIGLU = Activation(slope=1.702, limit=7.0, up_shift=1.0)
"""gpt-oss's (arXiv 2508.10925, section 2.2, and its published reference code)."""
