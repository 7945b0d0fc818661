"""Multi-head latent attention (arXiv 2405.04434, section 2.1)."""

from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.models.config import MLAConfig, RopeConfig
from titan_moe.models.layers.attention_core import AttentionCore
from titan_moe.models.layers.rope import Rotation, rotate, softmax_factor


class MLA(nn.Module):
    """Keys and values from a low-rank latent; all heads share the rotated part of the key."""

    def __init__(
        self, dim: int, config: MLAConfig, rope: RopeConfig, *, core: AttentionCore
    ) -> None:
        super().__init__()
        self.config = config
        self.pairing = rope.pairing
        qk_dim = config.nope_dim + config.rope_dim
        self.scale = qk_dim**-0.5 * softmax_factor(rope)
        self.core = core
        if config.q_rank is None:
            self.wq = nn.Linear(dim, config.num_heads * qk_dim, bias=False)
        else:
            self.wq_a = nn.Linear(dim, config.q_rank, bias=config.bias)
            self.q_norm = nn.RMSNorm(config.q_rank, eps=config.norm_eps)
            self.wq_b = nn.Linear(config.q_rank, config.num_heads * qk_dim, bias=False)
        self.wkv_a = nn.Linear(dim, config.kv_rank + config.rope_dim, bias=config.bias)
        self.kv_norm = nn.RMSNorm(config.kv_rank, eps=config.norm_eps)
        kv_dim = config.num_heads * (config.nope_dim + config.v_dim)
        self.wkv_b = nn.Linear(config.kv_rank, kv_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * config.v_dim, dim, bias=config.bias)

    def forward(self, x_BSD: Tensor, rotation: Rotation, mask: Any) -> Tensor:
        config = self.config
        q_BSHC = self._query(x_BSD).unflatten(-1, (-1, config.nope_dim + config.rope_dim))
        q_nope, q_rope = q_BSHC.split([config.nope_dim, config.rope_dim], dim=-1)
        q_BSHC = torch.cat([q_nope, rotate(q_rope, rotation, self.pairing)], dim=-1)

        latent_BSR, k_rope = self.wkv_a(x_BSD).split([config.kv_rank, config.rope_dim], dim=-1)
        kv_BSHC = self.wkv_b(self.kv_norm(latent_BSR))
        kv_BSHC = kv_BSHC.unflatten(-1, (-1, config.nope_dim + config.v_dim))
        k_nope, v_BSHC = kv_BSHC.split([config.nope_dim, config.v_dim], dim=-1)
        k_rope = rotate(k_rope[:, :, None], rotation, self.pairing)
        k_BSHC = torch.cat([k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)], dim=-1)

        o_BHSC = self.core(
            q_BSHC.transpose(1, 2), k_BSHC.transpose(1, 2), v_BSHC.transpose(1, 2), mask, self.scale
        )
        return self.wo(o_BHSC.transpose(1, 2).flatten(2))

    def _query(self, x_BSD: Tensor) -> Tensor:
        if self.config.q_rank is None:
            return self.wq(x_BSD)
        return self.wq_b(self.q_norm(self.wq_a(x_BSD)))
