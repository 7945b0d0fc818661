"""Dimensions of a decoder. No torch here: checks, planners and `--help` read it."""

from dataclasses import dataclass
from typing import Literal

from titan_moe.moe.config import MoEConfig


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071) as DeepSeek parametrises it."""

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclass(frozen=True)
class Llama3Scaling:
    """Frequency-band scaling of Llama 3.1 (its published reference code)."""

    factor: float
    original_max_seq_len: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions (arXiv 2104.09864)."""

    theta: float
    pairing: Literal["halves", "neighbours"] = "halves"
    """Channels that rotate together: i and i + C/2 (Hugging Face), or 2i and 2i + 1 (the paper)."""
    scaling: YarnScaling | Llama3Scaling | None = None


@dataclass(frozen=True)
class GQAConfig:
    """Grouped-query attention (arXiv 2305.13245)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False
    bias: bool = False
    """All four projections have a bias: Hugging Face's `attention_bias`."""


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1)."""

    num_heads: int
    q_rank: int | None
    """Rank of the query's latent; None projects queries directly."""
    kv_rank: int
    nope_dim: int
    """Channels of a head without position."""
    rope_dim: int
    """Channels of a head with position; the key's are shared by all heads."""
    v_dim: int
    bias: bool = False
    """The down-projections and the output projection have a bias: `attention_bias`."""

    @property
    def num_kv_heads(self) -> int:
        """Each head has keys and values of its own, made from the shared latent."""
        return self.num_heads


@dataclass(frozen=True)
class ModelConfig:
    """One flavor of one family."""

    vocab_size: int
    dim: int
    num_layers: int
    attention: GQAConfig | MLAConfig
    rope: RopeConfig
    hidden_dim: int
    """Hidden dim of the dense feed-forward layers."""
    moe: MoEConfig | None
    num_dense_layers: int = 0
    """The first layers whose feed-forward is dense although `moe` is set."""
    max_seq_len: int = 4096
    norm_eps: float = 1e-6
    init_std: float = 0.02
    """Standard deviation of the initial weights; projections back into the residual stream divide
    it by the square root of their number."""

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.num_dense_layers
