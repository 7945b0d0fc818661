"""Mixtral (arXiv 2401.04088), from the config.json files of mistralai/Mixtral-8x7B-v0.1 and
mistralai/Mixtral-8x22B-v0.1."""

from typing import Any

from titan_moe.models import hf_family as hf
from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.hf_rope import rope_from_hf
from titan_moe.ops.local_attention import LocalAttention

MODEL_TYPES = ("mixtral",)

_DEFAULTS = hf.DEFAULTS | {"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    hf.only(settings, hidden_act=("silu",), router_jitter_noise=(0.0,))
    window = settings.get("sliding_window")
    fields = hf.read_fields(settings, hf.BLOCK_SPARSE_KEYS, _DEFAULTS | hf.gqa_defaults(settings))
    fields |= {
        "rope": rope_from_hf({"rope_theta": 1e6, **settings}),
        "local": None if window is None else LocalAttention("window", window, global_every=0),
        "moe.normalize_top_k": True,
    }
    return hf.make_config(fields, GQAConfig)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    hf.attention_of(config, GQAConfig, "mixtral")
    window = None if config.local is None else config.local.size
    own = {"router_jitter_noise": 0.0, "sliding_window": window}
    return hf.settings_of(config, "Mixtral", "mixtral", hf.BLOCK_SPARSE_KEYS, **own)


def keys(config: ModelConfig) -> hf.HFKeys:
    """Names of each tensor. Biases of the routing have no place."""
    return hf.in_model({**hf.GQA_BLOCK, **hf.BLOCK_SPARSE_EXPERTS})
