"""Dimensions of DeepSeek-V2, DeepSeek-V3 and models built like them, from their config.json files:
deepseek-ai/DeepSeek-V2-Lite, DeepSeek-V2 and DeepSeek-V3 (arXiv 2405.04434 and 2412.19437),
moonshotai/Moonlight-16B-A3B (arXiv 2502.16982) and moonshotai/Kimi-K2-Base (arXiv 2507.20534).
"""

from titan_moe.models.config import MLAConfig, ModelConfig, RopeConfig, YarnScaling
from titan_moe.moe.config import MoEConfig

_V3_ROPE = RopeConfig(10_000.0, "neighbours", YarnScaling(40.0, 4096))
# Section 3.1.4 of V2's paper: the attention's temperature follows 0.0707 ln(factor) + 1.
_V2_ROPE = RopeConfig(
    10_000.0, "neighbours", YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
)

FLAVORS: dict[str, ModelConfig] = {
    # Trains on bytes in two minutes on two CPU cores, with every routing feature of V3 on.
    "2M": ModelConfig(
        vocab_size=272,
        dim=128,
        num_layers=4,
        num_dense_layers=1,
        hidden_dim=384,
        init_std=0.04,
        attention=MLAConfig(
            num_heads=4, q_rank=None, kv_rank=64, nope_dim=32, rope_dim=16, v_dim=32
        ),
        rope=RopeConfig(10_000.0, "neighbours"),
        moe=MoEConfig(
            num_experts=8,
            top_k=2,
            hidden_dim=128,
            num_shared_experts=1,
            score="sigmoid",
            normalize_top_k=True,
            num_groups=4,
            top_groups=2,
            group_score_top=2,
            bias_update_speed=1e-2,
            sequence_aux_loss_weight=1e-4,
        ),
    ),
    # For proving layouts: heads, experts and widths divide by 8, every feature and loss is on, and
    # a step takes a moment. Valid at any number of layers.
    "gate": ModelConfig(
        vocab_size=272,
        dim=32,
        num_layers=8,
        num_dense_layers=1,
        num_mtp_layers=1,
        hidden_dim=32,
        init_std=0.1,
        attention=MLAConfig(
            num_heads=8, q_rank=16, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8, bias=True
        ),
        rope=RopeConfig(10_000.0, "neighbours"),
        moe=MoEConfig(
            num_experts=8,
            top_k=2,
            hidden_dim=32,
            num_shared_experts=1,
            score="sigmoid",
            normalize_top_k=True,
            route_scale=1.5,
            num_groups=4,
            top_groups=2,
            group_score_top=2,
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
        num_dense_layers=1,
        hidden_dim=1024,
        attention=MLAConfig(
            num_heads=16, q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128
        ),
        rope=RopeConfig(10_000.0, "neighbours"),
        moe=MoEConfig(
            num_experts=8, top_k=3, hidden_dim=256, num_shared_experts=2, bias_update_speed=1e-3
        ),
    ),
    # DeepSeek-V2-Lite.
    "16B": ModelConfig(
        vocab_size=102_400,
        dim=2048,
        num_layers=27,
        num_dense_layers=1,
        hidden_dim=10_944,
        attention=MLAConfig(
            num_heads=16, q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128
        ),
        rope=_V2_ROPE,
        init_std=0.006,
        max_seq_len=163_840,
        moe=MoEConfig(
            num_experts=64,
            top_k=6,
            hidden_dim=1408,
            num_shared_experts=2,
            bias_update_speed=1e-3,
        ),
    ),
    # DeepSeek-V2.
    "236B": ModelConfig(
        vocab_size=102_400,
        dim=5120,
        num_layers=60,
        num_dense_layers=1,
        hidden_dim=12_288,
        attention=MLAConfig(
            num_heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128
        ),
        rope=_V2_ROPE,
        init_std=0.006,
        max_seq_len=163_840,
        moe=MoEConfig(
            num_experts=160,
            top_k=6,
            hidden_dim=1536,
            num_shared_experts=2,
            route_scale=16.0,
            num_groups=8,
            top_groups=3,
            group_score_top=1,
            bias_update_speed=1e-3,
        ),
    ),
    # DeepSeek-V3. The published count leaves out the multi-token prediction layer.
    "671B": ModelConfig(
        vocab_size=129_280,
        dim=7168,
        num_layers=61,
        num_dense_layers=3,
        num_mtp_layers=1,
        hidden_dim=18_432,
        attention=MLAConfig(
            num_heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128
        ),
        rope=_V3_ROPE,
        init_std=0.006,
        max_seq_len=163_840,
        moe=MoEConfig(
            num_experts=256,
            top_k=8,
            hidden_dim=2048,
            num_shared_experts=1,
            score="sigmoid",
            normalize_top_k=True,
            route_scale=2.5,
            num_groups=8,
            top_groups=4,
            group_score_top=2,
            bias_update_speed=1e-3,
            sequence_aux_loss_weight=1e-4,
        ),
    ),
    "Moonlight-16B-A3B": ModelConfig(
        vocab_size=163_840,
        dim=2048,
        num_layers=27,
        num_dense_layers=1,
        hidden_dim=11_264,
        attention=MLAConfig(
            num_heads=16, q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128
        ),
        rope=RopeConfig(50_000.0, "neighbours"),
        max_seq_len=8192,
        norm_eps=1e-5,
        moe=MoEConfig(
            num_experts=64,
            top_k=6,
            hidden_dim=1408,
            num_shared_experts=2,
            score="sigmoid",
            normalize_top_k=True,
            route_scale=2.446,
            bias_update_speed=1e-3,
            sequence_aux_loss_weight=1e-3,
        ),
    ),
    "Kimi-K2": ModelConfig(
        vocab_size=163_840,
        dim=7168,
        num_layers=61,
        num_dense_layers=1,
        hidden_dim=18_432,
        attention=MLAConfig(
            num_heads=64, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128
        ),
        rope=RopeConfig(50_000.0, "neighbours", YarnScaling(32.0, 4096, beta_fast=1.0)),
        max_seq_len=131_072,
        moe=MoEConfig(
            num_experts=384,
            top_k=8,
            hidden_dim=2048,
            num_shared_experts=1,
            score="sigmoid",
            normalize_top_k=True,
            route_scale=2.827,
            bias_update_speed=1e-3,
            sequence_aux_loss_weight=1e-3,
        ),
    ),
}
