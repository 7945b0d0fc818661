"""Grouped-query attention."""

from typing import Any

from torch import Tensor, nn

from titan_moe.models.config import GQAConfig, RopeConfig
from titan_moe.models.layers.attention_core import AttentionCore
from titan_moe.models.layers.rope import Rotation, rotate, softmax_factor


class GQA(nn.Module):
    """Queries in `num_heads` heads, keys and values in `num_kv_heads`; q and k may be normed."""

    def __init__(
        self, dim: int, config: GQAConfig, rope: RopeConfig, *, norm_eps: float, core: AttentionCore
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.pairing = rope.pairing
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

    def forward(self, x_BSD: Tensor, rotation: Rotation, mask: Any) -> Tensor:
        heads = (-1, self.head_dim)
        q_BSHC = self.q_norm(self.wq(x_BSD).unflatten(-1, heads))
        k_BSHC = self.k_norm(self.wk(x_BSD).unflatten(-1, heads))
        v_BSHC = self.wv(x_BSD).unflatten(-1, heads)
        q_BSHC = rotate(q_BSHC, rotation, self.pairing)
        k_BSHC = rotate(k_BSHC, rotation, self.pairing)
        o_BHSC = self.core(
            q_BSHC.transpose(1, 2), k_BSHC.transpose(1, 2), v_BSHC.transpose(1, 2), mask, self.scale
        )
        return self.wo(o_BHSC.transpose(1, 2).flatten(2))
