"""Mixtral in Hugging Face folders."""

from typing import Any

from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.hf_family import (
    BLOCK_NORMS,
    EMBEDDINGS,
    EXPERTS,
    GQA,
    HFCopies,
    HFKeys,
    HFWeight,
    Settings,
    attention_of,
    experts_of,
    given,
    in_layers,
    needed,
    only,
    rope_from_hf,
    rope_to_hf,
)
from titan_moe.moe.config import MoEConfig
from titan_moe.ops.local_attention import LocalAttention

_FAMILY = "mixtral"
MODEL_TYPES = ("mixtral",)
IGNORED = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
COPIES: HFCopies = {}


def from_hf(settings: Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    only(settings, hidden_act=("silu",), router_jitter_noise=(0.0,))
    heads, dim = needed(settings, "num_attention_heads"), needed(settings, "hidden_size")
    hidden_dim, window = needed(settings, "intermediate_size"), settings.get("sliding_window")
    return ModelConfig(
        vocab_size=needed(settings, "vocab_size"),
        dim=dim,
        num_layers=needed(settings, "num_hidden_layers"),
        hidden_dim=hidden_dim,
        attention=GQAConfig(
            num_heads=heads,
            num_kv_heads=given(settings, "num_key_value_heads", heads),
            head_dim=given(settings, "head_dim", dim // heads),
        ),
        rope=rope_from_hf(settings),
        local=None if window is None else LocalAttention("window", window, global_every=0),
        moe=MoEConfig(
            num_experts=needed(settings, "num_local_experts"),
            top_k=needed(settings, "num_experts_per_tok"),
            hidden_dim=hidden_dim,
            normalize_top_k=True,
        ),
        tied_embeddings=given(settings, "tie_word_embeddings", False),
        max_seq_len=given(settings, "max_position_embeddings", 131_072),
        norm_eps=given(settings, "rms_norm_eps", 1e-5),
        init_std=given(settings, "initializer_range", 0.02),
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    attention, moe = attention_of(config, GQAConfig, _FAMILY), experts_of(config, _FAMILY)
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": moe.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
        "sliding_window": None if config.local is None else config.local.size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": moe.global_aux_loss_weight,
        "router_jitter_noise": 0.0,
        **rope_to_hf(config.rope),
    }


# As published, one tensor per expert; then as transformers 5 keeps them in memory.
_EXPERTS: HFKeys = {
    "moe.router.gate.weight": (
        HFWeight("block_sparse_moe.gate.weight"),
        *EXPERTS["moe.router.gate.weight"],
    ),
    **{
        f"moe.experts.{w}": (
            HFWeight(f"block_sparse_moe.experts.{{expert}}.{w}.weight"),
            *EXPERTS[f"moe.experts.{w}"],
        )
        for w in ("w1", "w2", "w3")
    },
}


def keys(config: ModelConfig) -> HFKeys:
    """Where each tensor is. Biases of the routing have no place."""
    attention_of(config, GQAConfig, _FAMILY)
    return {**EMBEDDINGS, **in_layers({**BLOCK_NORMS, **GQA, **_EXPERTS})}
