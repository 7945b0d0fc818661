"""gpt-oss (arXiv 2508.10925), from the config.json files of openai/gpt-oss-20b and
openai/gpt-oss-120b. Its experts are stacks, gate and up projections interleaved."""

from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.hf_rope import rope_from_hf
from titan_moe.ops.local_attention import LocalAttention

MODEL_TYPES = ("gpt_oss",)

_DEFAULTS = hf.DEFAULTS | {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
}


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    hf.only(settings, hidden_act=("silu",), swiglu_alpha=(1.702,), swiglu_limit=(7.0,))
    # Without the key, transformers takes the published models' YaRN.
    if settings.get("rope_parameters") is None and settings.get("rope_scaling") is None:
        raise ConfigError("config.json: rope_scaling is missing; none is {'rope_type': 'default'}")
    fields = hf.read_fields(settings, hf.LOCAL_EXPERT_KEYS, _DEFAULTS | hf.gqa_defaults(settings))
    fields |= {
        "attention.sinks": True,
        "rope": rope_from_hf({"rope_theta": 150_000.0, **settings}),
        "local": _local(settings),
        "moe.normalize_top_k": True,
        "moe.router_bias": True,
        "moe.projection_bias": True,
        "moe.activation": "clamped_swiglu",
    }
    return hf.make_config(fields, GQAConfig)


def _local(settings: hf.Settings) -> LocalAttention | None:
    window = settings.get("sliding_window", 128)
    num_layers = hf.needed(settings, "num_hidden_layers")
    alternating = ["sliding_attention", "full_attention"] * num_layers
    kinds = hf.given(settings, "layer_types", alternating[:num_layers])
    sees_all = [kind == "full_attention" for kind in kinds]
    if window is None or all(sees_all):
        return None
    return LocalAttention("window", window, global_every=hf.period("layer_types", sees_all))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    hf.attention_of(config, GQAConfig, "gpt_oss")
    local = [config.local_in(layer) is not None for layer in range(config.num_layers)]
    settings = hf.settings_of(
        config,
        "GptOss",
        "gpt_oss",
        hf.LOCAL_EXPERT_KEYS,
        swiglu_limit=7.0,
        sliding_window=None if config.local is None else config.local.size,
        layer_types=["sliding_attention" if near else "full_attention" for near in local],
    )
    return settings | {"rope_scaling": settings["rope_scaling"] or {"rope_type": "default"}}


_SINKS: hf.HFKeys = {"attention.sinks.weight": (hf.HFWeight("self_attn.sinks"),)}
_EXPERTS: hf.HFKeys = {
    "moe.router.gate.weight": (hf.HFWeight("mlp.router.weight"),),
    "moe.router.gate.bias": (hf.HFWeight("mlp.router.bias"),),
    "moe.experts.w1": (hf.HFWeight("mlp.experts.gate_up_proj", transposed=True, rows="even"),),
    "moe.experts.w3": (hf.HFWeight("mlp.experts.gate_up_proj", transposed=True, rows="odd"),),
    "moe.experts.w2": (hf.HFWeight("mlp.experts.down_proj", transposed=True),),
    "moe.experts.b1": (hf.HFWeight("mlp.experts.gate_up_proj_bias", rows="even"),),
    "moe.experts.b3": (hf.HFWeight("mlp.experts.gate_up_proj_bias", rows="odd"),),
    "moe.experts.b2": (hf.HFWeight("mlp.experts.down_proj_bias"),),
}


def keys(config: ModelConfig) -> hf.HFKeys:
    """Names of each tensor. Biases of the routing's choice have no place."""
    return hf.in_model({**hf.GQA_BLOCK, **_SINKS, **_EXPERTS})
