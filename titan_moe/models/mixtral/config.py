"""Mixtral dimensions (arXiv 2401.04088), from the config.json of mistralai/Mixtral-8x7B-v0.1 and
mistralai/Mixtral-8x22B-v0.1."""

from titan_moe.models.config import GQAConfig, ModelConfig, RopeConfig
from titan_moe.moe.config import MoEConfig

FLAVORS: dict[str, ModelConfig] = {
    # For proving layouts: heads, experts and widths divide by 8, every feature and loss is on, and
    # a step takes a moment. Valid at any number of layers.
    "gate": ModelConfig(
        vocab_size=272,
        dim=32,
        num_layers=8,
        hidden_dim=32,
        norm_eps=1e-5,
        init_std=0.1,
        attention=GQAConfig(num_heads=16, num_kv_heads=8, head_dim=8),
        rope=RopeConfig(10_000.0),
        moe=MoEConfig(
            num_experts=8,
            top_k=2,
            hidden_dim=32,
            normalize_top_k=True,
            bias_update_speed=0.05,
            sequence_aux_loss_weight=1e-2,
            global_aux_loss_weight=1e-2,
            z_loss_weight=1e-3,
        ),
    ),
    "debugmodel": ModelConfig(
        vocab_size=2048,
        dim=256,
        num_layers=4,
        hidden_dim=512,
        norm_eps=1e-5,
        attention=GQAConfig(num_heads=8, num_kv_heads=4, head_dim=32),
        rope=RopeConfig(10_000.0),
        moe=MoEConfig(
            num_experts=8,
            top_k=2,
            hidden_dim=512,
            normalize_top_k=True,
            global_aux_loss_weight=0.02,
        ),
    ),
    "8x7B": ModelConfig(
        vocab_size=32_000,
        dim=4096,
        num_layers=32,
        hidden_dim=14_336,
        max_seq_len=32_768,
        norm_eps=1e-5,
        attention=GQAConfig(num_heads=32, num_kv_heads=8, head_dim=128),
        rope=RopeConfig(1_000_000.0),
        moe=MoEConfig(
            num_experts=8,
            top_k=2,
            hidden_dim=14_336,
            normalize_top_k=True,
            global_aux_loss_weight=0.02,
        ),
    ),
    "8x22B": ModelConfig(
        vocab_size=32_000,
        dim=6144,
        num_layers=56,
        hidden_dim=16_384,
        max_seq_len=65_536,
        norm_eps=1e-5,
        attention=GQAConfig(num_heads=48, num_kv_heads=8, head_dim=128),
        rope=RopeConfig(1_000_000.0),
        moe=MoEConfig(
            num_experts=8,
            top_k=2,
            hidden_dim=16_384,
            normalize_top_k=True,
            global_aux_loss_weight=0.001,
        ),
    ),
}
