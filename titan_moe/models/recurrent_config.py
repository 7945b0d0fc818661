"""Dimensions of layers with a recurrent state in place of attention. No torch here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GatedDeltaConfig:
    """Layers with a recurrent state in place of attention: the gated delta rule (arXiv 2412.06464),
    or Kimi Delta Attention (arXiv 2510.26692)."""

    num_key_heads: int
    """Heads of queries and keys."""
    num_value_heads: int
    """A multiple of it: consecutive heads share a key head. Each has a state [key_dim, value_dim].
    """
    key_dim: int
    value_dim: int
    conv_size: int
    """Tokens that a channel's convolution sees, its own among them."""
    gate_rank: int | None = None
    """Kimi Delta Attention: each channel of a key decays at a rate of its own, and the projections
    of the decay and of the output's gate have this rank. None: a head's channels decay alike."""
    files_join_heads: bool = False
    """Published files keep a key head's projections in one tensor, as Qwen3-Next's do. Nothing else
    depends on it."""


@dataclass(frozen=True)
class Mamba2Config:
    """Layers of Mamba-2 (arXiv 2405.21060): a state per head that decays and is added to. The
    paper's C, B and x are queries, keys and values here."""

    num_key_heads: int
    """Groups: their heads share a B and a C, and their channels one norm."""
    num_value_heads: int
    """A multiple of it. Each has a state [key_dim, value_dim]."""
    key_dim: int
    """Channels of B and C: the state's size."""
    value_dim: int
    conv_size: int
    """Tokens that a channel's convolution sees, its own among them."""
    conv_bias: bool = True
    time_step_min: float = 0.001
    """Least time step, and least initial one."""
    time_step_max: float = 0.1
    """Largest initial time step."""
    time_step_floor: float = 1e-4
    """Bound of initial time steps, where it is above `time_step_min`."""


RecurrentConfig = GatedDeltaConfig | Mamba2Config
