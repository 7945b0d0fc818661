"""Mixtral (arXiv 2401.04088), from the config.json files of mistralai/Mixtral-8x7B-v0.1 and
mistralai/Mixtral-8x22B-v0.1."""

from typing import Any

from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.hf_family import (
    BLOCK_NORMS,
    BLOCK_SPARSE_EXPERTS,
    BLOCK_SPARSE_KEYS,
    DEFAULTS,
    EMBEDDINGS,
    GQA,
    HFCopies,
    HFKeys,
    Settings,
    attention_of,
    gqa_defaults,
    in_layers,
    make_config,
    only,
    read_fields,
    rope_from_hf,
    rope_to_hf,
    write_fields,
)
from titan_moe.ops.local_attention import LocalAttention

_FAMILY = "mixtral"
MODEL_TYPES = ("mixtral",)
IGNORED = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
COPIES: HFCopies = {}

_DEFAULTS = DEFAULTS | {"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}


def from_hf(settings: Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    only(settings, hidden_act=("silu",), router_jitter_noise=(0.0,))
    window = settings.get("sliding_window")
    fields = read_fields(settings, BLOCK_SPARSE_KEYS, _DEFAULTS | gqa_defaults(settings))
    fields |= {
        "rope": rope_from_hf(settings),
        "local": None if window is None else LocalAttention("window", window, global_every=0),
        "moe.normalize_top_k": True,
    }
    return make_config(fields, GQAConfig)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    attention_of(config, GQAConfig, _FAMILY)
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_act": "silu",
        "router_jitter_noise": 0.0,
        "sliding_window": None if config.local is None else config.local.size,
        **write_fields(config, BLOCK_SPARSE_KEYS),
        **rope_to_hf(config.rope),
    }


def keys(config: ModelConfig) -> HFKeys:
    """Names of each tensor. Biases of the routing have no place."""
    attention_of(config, GQAConfig, _FAMILY)
    return {**EMBEDDINGS, **in_layers({**BLOCK_NORMS, **GQA, **BLOCK_SPARSE_EXPERTS})}
