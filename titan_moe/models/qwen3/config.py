"""Qwen3 MoE dimensions, from the config.json that each model is published with (arXiv
2505.09388)."""

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
        init_std=0.1,
        attention=GQAConfig(num_heads=16, num_kv_heads=8, head_dim=8, qk_norm="learned", bias=True),
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
    "debugmodel_moe": ModelConfig(
        vocab_size=2048,
        dim=256,
        num_layers=4,
        hidden_dim=512,
        attention=GQAConfig(num_heads=8, num_kv_heads=4, head_dim=32, qk_norm="learned"),
        rope=RopeConfig(10_000.0),
        moe=MoEConfig(num_experts=8, top_k=2, hidden_dim=512, normalize_top_k=True),
    ),
    "30B-A3B": ModelConfig(
        vocab_size=151_936,
        dim=2048,
        num_layers=48,
        hidden_dim=6144,
        attention=GQAConfig(num_heads=32, num_kv_heads=4, head_dim=128, qk_norm="learned"),
        rope=RopeConfig(1_000_000.0),
        max_seq_len=40_960,
        moe=MoEConfig(
            num_experts=128,
            top_k=8,
            hidden_dim=768,
            normalize_top_k=True,
            global_aux_loss_weight=1e-3,
        ),
    ),
    "235B-A22B": ModelConfig(
        vocab_size=151_936,
        dim=4096,
        num_layers=94,
        hidden_dim=12_288,
        attention=GQAConfig(num_heads=64, num_kv_heads=4, head_dim=128, qk_norm="learned"),
        rope=RopeConfig(1_000_000.0),
        max_seq_len=40_960,
        moe=MoEConfig(
            num_experts=128,
            top_k=8,
            hidden_dim=1536,
            normalize_top_k=True,
            global_aux_loss_weight=1e-3,
        ),
    ),
}
