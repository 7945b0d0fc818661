"""gpt-oss dimensions (arXiv 2508.10925), from the config.json of openai/gpt-oss-20b and
openai/gpt-oss-120b."""

from titan_moe.models.config import GQAConfig, ModelConfig, RopeConfig, YarnScaling
from titan_moe.moe.config import MoEConfig
from titan_moe.ops.local_attention import LocalAttention

# Cosines and sines times 0.1 ln(factor) + 1, softmax untouched: YaRN as its paper has it.
_ROPE = RopeConfig(
    150_000.0, scaling=YarnScaling(32.0, 4096, mscale=1.0, mscale_all_dim=0.0, truncate=False)
)
_ATTENTION = GQAConfig(num_heads=64, num_kv_heads=8, head_dim=64, bias=True, sinks=True)
_LOCAL = LocalAttention("window", 128, global_every=2)

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
        attention=GQAConfig(num_heads=16, num_kv_heads=8, head_dim=8, bias=True, sinks=True),
        rope=RopeConfig(
            10_000.0, scaling=YarnScaling(4.0, 16, mscale=1.0, mscale_all_dim=0.0, truncate=False)
        ),
        local=LocalAttention("window", 10, global_every=2),
        moe=MoEConfig(
            num_experts=8,
            top_k=2,
            hidden_dim=32,
            normalize_top_k=True,
            router_bias=True,
            projection_bias=True,
            activation="clamped_swiglu",
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
        hidden_dim=256,
        norm_eps=1e-5,
        attention=GQAConfig(num_heads=8, num_kv_heads=4, head_dim=32, bias=True, sinks=True),
        rope=_ROPE,
        local=_LOCAL,
        moe=MoEConfig(
            num_experts=8,
            top_k=4,
            hidden_dim=256,
            normalize_top_k=True,
            router_bias=True,
            projection_bias=True,
            activation="clamped_swiglu",
            global_aux_loss_weight=1e-3,
        ),
    ),
    "20b": ModelConfig(
        vocab_size=201_088,
        dim=2880,
        num_layers=24,
        hidden_dim=2880,
        max_seq_len=131_072,
        norm_eps=1e-5,
        attention=_ATTENTION,
        rope=_ROPE,
        local=_LOCAL,
        moe=MoEConfig(
            num_experts=32,
            top_k=4,
            hidden_dim=2880,
            normalize_top_k=True,
            router_bias=True,
            projection_bias=True,
            activation="clamped_swiglu",
            global_aux_loss_weight=1e-3,
        ),
    ),
    "120b": ModelConfig(
        vocab_size=201_088,
        dim=2880,
        num_layers=36,
        hidden_dim=2880,
        max_seq_len=131_072,
        norm_eps=1e-5,
        attention=_ATTENTION,
        rope=_ROPE,
        local=_LOCAL,
        moe=MoEConfig(
            num_experts=128,
            top_k=4,
            hidden_dim=2880,
            normalize_top_k=True,
            router_bias=True,
            projection_bias=True,
            activation="clamped_swiglu",
            global_aux_loss_weight=1e-3,
        ),
    ),
}
