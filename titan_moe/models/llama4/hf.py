"""Llama 4's text model, from the `text_config` that Llama-4-Scout-17B-16E-Instruct and
Llama-4-Maverick-17B-128E-Instruct are published with.

Scout's base model differs from its Instruct model in rotary scaling (8 instead of 16, with a band
of blended channels) and in length (262,144 tokens): import it from its own config.json. The text
model is read alone (`llama4_text`), or inside the published one (`llama4`).
"""

from typing import Any

from titan_moe.models import hf_family as hf
from titan_moe.models.config import GQAConfig, ModelConfig, PositionTemperature
from titan_moe.models.hf_rope import rope_from_hf
from titan_moe.ops.local_attention import LocalAttention

MODEL_TYPES = ("llama4_text",)

_KEYS = hf.LOCAL_EXPERT_KEYS | {"hidden_dim": "intermediate_size_mlp"}
_DEFAULTS = hf.DEFAULTS | {"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    hf.only(settings, hidden_act=("silu",), router_jitter_noise=(0.0,))
    fields = hf.read_fields(settings, _KEYS, _DEFAULTS | hf.gqa_defaults(settings))
    fields |= {
        "attention.qk_norm": "unweighted" if hf.given(settings, "use_qk_norm", True) else "none",
        "attention.temperature": _temperature(settings),
        "rope": rope_from_hf({"rope_theta": 5e5, **settings}, "neighbours"),
        "local": _local(settings),
        "moe_every": _moe_every(settings),
        "moe.num_shared_experts": 1,
        "moe.score": "sigmoid",
        "moe.weights_scale": "inputs",
    }
    return hf.make_config(fields, GQAConfig)


def _temperature(settings: hf.Settings) -> PositionTemperature | None:
    # Published as the number 4 or as a boolean.
    if not hf.given(settings, "attn_temperature_tuning", True):
        return None
    return PositionTemperature(
        scale=hf.given(settings, "attn_scale", 0.1),
        floor=int(hf.given(settings, "floor_scale", 8192)),
    )


def _local(settings: hf.Settings) -> LocalAttention:
    # Layers without rotary positions are those that see the whole sequence.
    num_layers = settings["num_hidden_layers"]
    every = hf.given(settings, "no_rope_layer_interval", 4)
    rotates = settings.get("no_rope_layers") or [
        (layer + 1) % every != 0 for layer in range(num_layers)
    ]
    sees_all = [not each for each in rotates[:num_layers]]
    kinds = ["full_attention" if each else "chunked_attention" for each in sees_all]
    hf.only(settings, layer_types=(kinds,))
    return LocalAttention(
        "chunk",
        hf.given(settings, "attention_chunk_size", 8192),
        global_every=hf.period("no_rope_layers", sees_all),
        global_rotary=False,
    )


def _moe_every(settings: hf.Settings) -> int:
    layers = settings.get("moe_layers")
    if layers is None:
        return hf.given(settings, "interleave_moe_layer_step", 1)
    has_experts = [layer in layers for layer in range(settings["num_hidden_layers"])]
    return hf.period("moe_layers", has_experts)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    attention = hf.attention_of(config, GQAConfig, "llama4")
    layers = range(config.num_layers)
    temperature = attention.temperature or PositionTemperature(scale=0.1, floor=8192)
    own = {
        "router_jitter_noise": 0.0,
        "attention_chunk_size": config.max_seq_len if config.local is None else config.local.size,
        "no_rope_layers": [int(config.rotates(layer)) for layer in layers],
        "use_qk_norm": attention.qk_norm == "unweighted",
        "attn_temperature_tuning": attention.temperature is not None,
        "attn_scale": temperature.scale,
        "floor_scale": temperature.floor,
        "interleave_moe_layer_step": config.moe_every,
        "moe_layers": [layer for layer in layers if config.is_moe_layer(layer)],
    }
    return hf.settings_of(config, "Llama4", "llama4_text", _KEYS, **own)


_FEED_FORWARD = {
    **hf.renamed("feed_forward.*.weight", "feed_forward.*.weight", hf.PROJECTIONS),
    **hf.renamed(
        "moe.shared_experts.*.weight", "feed_forward.shared_expert.*.weight", hf.PROJECTIONS
    ),
}
_EXPERTS: hf.HFKeys = {
    "moe.router.gate.weight": (hf.HFWeight("feed_forward.router.weight"),),
    "moe.experts.w1": (
        hf.HFWeight("feed_forward.experts.gate_up_proj", transposed=True, rows="first half"),
    ),
    "moe.experts.w3": (
        hf.HFWeight("feed_forward.experts.gate_up_proj", transposed=True, rows="second half"),
    ),
    "moe.experts.w2": (hf.HFWeight("feed_forward.experts.down_proj", transposed=True),),
}


def keys(config: ModelConfig) -> hf.HFKeys:
    """Names of each tensor. Biases of the routing have no place."""
    return hf.in_model({**hf.GQA_BLOCK, **_FEED_FORWARD, **_EXPERTS})
