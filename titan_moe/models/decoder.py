"""The decoder that all families share, as a plain single-device module.

Parameter names are torchtitan's: `layers.3.moe.experts.w1`, `layers.3.attention.wq.weight`, ...
"""

from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.layers.attention_core import AttentionCore, CausalSdpa
from titan_moe.models.layers.feed_forward import FeedForward
from titan_moe.models.layers.gqa import GQA
from titan_moe.models.layers.mla import MLA
from titan_moe.models.layers.rope import Rope, Rotation
from titan_moe.moe.layer import MoE


class Block(nn.Module):
    """Pre-norm attention, then a dense or MoE feed-forward, each added to the stream."""

    def __init__(self, layer: int, config: ModelConfig, core: AttentionCore) -> None:
        super().__init__()
        attention = GQA if isinstance(config.attention, GQAConfig) else MLA
        self.attention = attention(
            config.dim,
            config.attention,  # type: ignore[arg-type]
            config.rope,
            norm_eps=config.norm_eps,
            core=core,
        )
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.moe: MoE | None = None
        self.feed_forward: FeedForward | None = None
        if config.is_moe_layer(layer):
            assert config.moe is not None
            shared_dim = config.moe.num_shared_experts * config.moe.hidden_dim
            shared = FeedForward(config.dim, shared_dim) if shared_dim else None
            self.moe = MoE(config.dim, config.moe, shared)
        else:
            self.feed_forward = FeedForward(config.dim, config.hidden_dim)

    def forward(self, x_BSD: Tensor, rotation: Rotation, mask: Any) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotation, mask)
        feed_forward = self.feed_forward if self.moe is None else self.moe
        assert feed_forward is not None
        return x_BSD + feed_forward(self.ffn_norm(x_BSD))


class Decoder(nn.Module):
    """Token ids to logits."""

    def __init__(self, config: ModelConfig, core: AttentionCore | None = None) -> None:
        super().__init__()
        self.config = config
        self.core = core or CausalSdpa()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        attention = config.attention
        rope_dim = attention.head_dim if isinstance(attention, GQAConfig) else attention.rope_dim
        self.rope = Rope(rope_dim, config.rope)
        # A dict, not a list: a pipeline stage keeps the numbers of the layers that it holds.
        self.layers = nn.ModuleDict(
            {str(layer): Block(layer, config, self.core) for layer in range(config.num_layers)}
        )
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens_BS: Tensor, documents_BS: Tensor, positions_BS: Tensor) -> Tensor:
        """Logits [B, S, V] in the compute type.

        Args:
            tokens_BS: token ids.
            documents_BS: which document of its row each token belongs to, counted from 0.
            positions_BS: each token's position in its row.
        """
        x_BSD = self.tok_embeddings(tokens_BS)
        rotation = self.rope(positions_BS, x_BSD.dtype)
        mask = self.core.mask(documents_BS)
        for block in self.layers.values():
            x_BSD = block(x_BSD, rotation, mask)
        return self.output(self.norm(x_BSD))

    def moe_layers(self) -> dict[str, MoE]:
        """The MoE layers by the name of their block: {"layers.1": MoE, ...}."""
        blocks = {f"layers.{name}": block for name, block in self.layers.items()}
        return {name: block.moe for name, block in blocks.items() if block.moe is not None}  # type: ignore[misc]


def initial_std(name: str, config: ModelConfig) -> float | None:
    """Standard deviation that a parameter is drawn with; None for a norm's weight: ones."""
    parts = name.split(".")
    if parts[-1] == "bias":
        return 0.0
    if any(part.endswith("norm") for part in parts):
        return None
    if "wo" in parts or "w2" in parts:
        return config.init_std / (2 * config.num_layers) ** 0.5
    return config.init_std


def move_off_meta(
    model: nn.Module, device: torch.device, *, parameter_device: torch.device
) -> None:
    """Allocate a meta-device model; buffers get their first values, parameters stay unset."""
    model.to_empty(device=parameter_device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
        init_buffers = getattr(module, "init_buffers", None)
        if init_buffers is not None:
            init_buffers()
