"""Llama 4's text model, from the `text_config` that Llama-4-Scout-17B-16E-Instruct and
Llama-4-Maverick-17B-128E-Instruct are published with.

Scout's base model differs from its Instruct model in rotary scaling (8 instead of 16, with a band
of blended channels) and in length (262,144 tokens): import it from its own config.json.
"""

from titan_moe.models.config import (
    GQAConfig,
    Llama3Scaling,
    ModelConfig,
    PositionTemperature,
    RopeConfig,
)
from titan_moe.moe.config import MoEConfig
from titan_moe.ops.local_attention import LocalAttention

FLAVORS: dict[str, ModelConfig] = {
    # For proving layouts: heads, experts and widths divide by 8, every feature and loss is on, and
    # a step takes a moment. Valid at 2 layers and more: the first has no experts.
    "gate": ModelConfig(
        vocab_size=272,
        dim=32,
        num_layers=8,
        hidden_dim=32,
        norm_eps=1e-5,
        init_std=0.1,
        attention=GQAConfig(
            num_heads=16,
            num_kv_heads=8,
            head_dim=8,
            qk_norm="unweighted",
            temperature=PositionTemperature(scale=0.1, floor=8),
        ),
        rope=RopeConfig(10_000.0, "neighbours", Llama3Scaling(4.0, original_max_seq_len=16)),
        local=LocalAttention("chunk", 16, global_every=3, global_rotary=False),
        moe_every=2,
        moe=MoEConfig(
            num_experts=8,
            top_k=1,
            hidden_dim=32,
            num_shared_experts=1,
            score="sigmoid",
            weights_scale="inputs",
            bias_update_speed=0.05,
            sequence_aux_loss_weight=1e-2,
            global_aux_loss_weight=1e-2,
            z_loss_weight=1e-3,
        ),
    ),
    "debugmodel": ModelConfig(
        vocab_size=2048,
        dim=256,
        num_layers=6,
        hidden_dim=512,
        norm_eps=1e-5,
        attention=GQAConfig(
            num_heads=8,
            num_kv_heads=4,
            head_dim=32,
            qk_norm="unweighted",
            temperature=PositionTemperature(scale=0.1, floor=8192),
        ),
        rope=RopeConfig(500_000.0, "neighbours"),
        local=LocalAttention("chunk", 256, global_every=4, global_rotary=False),
        moe_every=2,
        moe=MoEConfig(
            num_experts=8,
            top_k=1,
            hidden_dim=256,
            num_shared_experts=1,
            score="sigmoid",
            weights_scale="inputs",
            bias_update_speed=1e-3,
        ),
    ),
    # Scout.
    "17bx16e": ModelConfig(
        vocab_size=202_048,
        dim=5120,
        num_layers=48,
        hidden_dim=16_384,
        max_seq_len=10_485_760,
        norm_eps=1e-5,
        attention=GQAConfig(
            num_heads=40,
            num_kv_heads=8,
            head_dim=128,
            qk_norm="unweighted",
            temperature=PositionTemperature(scale=0.1, floor=8192),
        ),
        # Both bands end at the same wavelength: channels are kept or divided, none is blended.
        rope=RopeConfig(
            500_000.0, "neighbours", Llama3Scaling(16.0, 8192, 1.0, high_freq_factor=1.0)
        ),
        local=LocalAttention("chunk", 8192, global_every=4, global_rotary=False),
        moe=MoEConfig(
            num_experts=16,
            top_k=1,
            hidden_dim=8192,
            num_shared_experts=1,
            score="sigmoid",
            weights_scale="inputs",
            bias_update_speed=1e-3,
        ),
    ),
    # Maverick: every other layer is dense, and queries and keys are not normed.
    "17bx128e": ModelConfig(
        vocab_size=202_048,
        dim=5120,
        num_layers=48,
        hidden_dim=16_384,
        max_seq_len=1_048_576,
        norm_eps=1e-5,
        attention=GQAConfig(
            num_heads=40,
            num_kv_heads=8,
            head_dim=128,
            temperature=PositionTemperature(scale=0.1, floor=8192),
        ),
        rope=RopeConfig(500_000.0, "neighbours"),
        local=LocalAttention("chunk", 8192, global_every=4, global_rotary=False),
        moe_every=2,
        moe=MoEConfig(
            num_experts=128,
            top_k=1,
            hidden_dim=8192,
            num_shared_experts=1,
            score="sigmoid",
            weights_scale="inputs",
            bias_update_speed=1e-3,
        ),
    ),
}
