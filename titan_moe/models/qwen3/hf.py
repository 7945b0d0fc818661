"""Qwen3 in Hugging Face folders: dense models (`qwen3`) and those with experts (`qwen3_moe`)."""

from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.hf_family import (
    BLOCK_NORMS,
    EMBEDDINGS,
    EXPERTS,
    FEED_FORWARD,
    GQA,
    GQA_BIASES,
    QK_NORMS,
    HFCopies,
    HFKeys,
    Settings,
    attention_of,
    given,
    in_layers,
    needed,
    only,
    rope_from_hf,
    rope_to_hf,
)
from titan_moe.moe.config import MoEConfig

_FAMILY = "qwen3"
MODEL_TYPES = ("qwen3", "qwen3_moe")
IGNORED: tuple[str, ...] = ()
COPIES: HFCopies = {}


def from_hf(settings: Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    only(settings, hidden_act=("silu",), use_sliding_window=(False,))
    heads, dim = needed(settings, "num_attention_heads"), needed(settings, "hidden_size")
    with_experts = settings.get("model_type") == "qwen3_moe"
    return ModelConfig(
        vocab_size=needed(settings, "vocab_size"),
        dim=dim,
        num_layers=needed(settings, "num_hidden_layers"),
        hidden_dim=needed(settings, "intermediate_size"),
        attention=GQAConfig(
            num_heads=heads,
            num_kv_heads=given(settings, "num_key_value_heads", heads),
            head_dim=given(settings, "head_dim", dim // heads if with_experts else 128),
            qk_norm="learned",
            bias=given(settings, "attention_bias", False),
        ),
        rope=rope_from_hf(settings),
        moe=_experts(settings) if with_experts else None,
        num_dense_layers=_dense_layers(settings) if with_experts else 0,
        moe_every=given(settings, "decoder_sparse_step", 1) if with_experts else 1,
        tied_embeddings=given(settings, "tie_word_embeddings", False),
        max_seq_len=given(settings, "max_position_embeddings", 32_768),
        norm_eps=given(settings, "rms_norm_eps", 1e-6),
        init_std=given(settings, "initializer_range", 0.02),
    )


def _experts(settings: Settings) -> MoEConfig:
    return MoEConfig(
        # transformers 5 writes either name.
        num_experts=given(settings, "num_experts", None) or needed(settings, "num_local_experts"),
        top_k=needed(settings, "num_experts_per_tok"),
        hidden_dim=needed(settings, "moe_intermediate_size"),
        normalize_top_k=given(settings, "norm_topk_prob", False),
    )


def _dense_layers(settings: Settings) -> int:
    dense = sorted(given(settings, "mlp_only_layers", []))
    if dense != list(range(len(dense))):
        raise ConfigError([f"config.json: mlp_only_layers={dense} must be the first layers"])
    return len(dense)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    attention, moe = attention_of(config, GQAConfig, _FAMILY), config.moe
    settings: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM" if moe is None else "Qwen3MoeForCausalLM"],
        "model_type": "qwen3" if moe is None else "qwen3_moe",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        **rope_to_hf(config.rope),
    }
    if moe is not None:
        settings |= {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.hidden_dim,
            "norm_topk_prob": moe.normalize_top_k,
            "decoder_sparse_step": config.moe_every,
            "mlp_only_layers": list(range(config.num_dense_layers)),
        }
    return settings


def keys(config: ModelConfig) -> HFKeys:
    """Where each tensor is. Biases of the routing have no place."""
    attention = attention_of(config, GQAConfig, _FAMILY)
    block = {**BLOCK_NORMS, **GQA, **QK_NORMS, **FEED_FORWARD, **EXPERTS}
    if attention.bias:
        block |= GQA_BIASES
    return {**EMBEDDINGS, **in_layers(block)}
