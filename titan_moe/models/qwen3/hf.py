"""Qwen3, dense (`qwen3`) and with experts (`qwen3_moe`): arXiv 2505.09388, tables 1 and 2, and the
config.json files of Qwen/Qwen3-0.6B-Base and so on. The text models of Qwen3-VL are the same."""

from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.hf_rope import rope_from_hf

_WITH_EXPERTS = ("qwen3_moe", "qwen3_vl_moe_text")
MODEL_TYPES = ("qwen3", "qwen3_vl_text", *_WITH_EXPERTS)

_DEFAULTS = hf.DEFAULTS | {
    "max_position_embeddings": 32_768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
}


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    hf.only(settings, hidden_act=("silu",), use_sliding_window=(False,))
    with_experts = settings.get("model_type") in _WITH_EXPERTS
    defaults = _DEFAULTS | hf.gqa_defaults(settings)
    if not with_experts:
        defaults["head_dim"] = 128
    fields = hf.read_fields(settings, hf.GQA_KEYS, defaults)
    fields |= {"attention.qk_norm": "learned", "rope": rope_from_hf(settings)}
    if with_experts:
        # transformers 5 may write another name.
        if settings.get("num_local_experts") is not None:
            defaults["num_experts"] = settings["num_local_experts"]
        fields |= hf.read_fields(settings, hf.QWEN_EXPERT_KEYS, defaults)
        fields["num_dense_layers"] = _dense_layers(settings)
    return hf.make_config(fields, GQAConfig)


def _dense_layers(settings: hf.Settings) -> int:
    dense = sorted(hf.given(settings, "mlp_only_layers", []))
    if dense != list(range(len(dense))):
        raise ConfigError(f"config.json: mlp_only_layers={dense} must be the first layers")
    return len(dense)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    hf.attention_of(config, GQAConfig, "qwen3")
    names = ("Qwen3", "qwen3") if config.moe is None else ("Qwen3Moe", "qwen3_moe")
    settings = hf.settings_of(config, *names, hf.GQA_KEYS, use_sliding_window=False)
    if config.moe is not None:
        settings |= hf.write_fields(config, hf.QWEN_EXPERT_KEYS)
        settings["mlp_only_layers"] = list(range(config.num_dense_layers))
    return settings


def keys(config: ModelConfig) -> hf.HFKeys:
    """Names of each tensor. Biases of the routing have no place."""
    feed_forward = {**hf.FEED_FORWARD, **hf.EXPERTS}
    return hf.in_model({**hf.GQA_BLOCK, **hf.QK_NORMS, **feed_forward})
