"""Llama 4 in Hugging Face folders: the text model alone (`llama4_text`), or inside the published
one (`llama4`), whose vision tower is left out. Goes out as the text model."""

from dataclasses import replace
from typing import Any

from titan_moe.models.config import GQAConfig, ModelConfig, PositionTemperature
from titan_moe.models.hf_family import (
    BLOCK_NORMS,
    EMBEDDINGS,
    GQA,
    GQA_BIASES,
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
    period,
    rope_from_hf,
    rope_to_hf,
)
from titan_moe.moe.config import MoEConfig
from titan_moe.ops.local_attention import LocalAttention

_FAMILY = "llama4"
MODEL_TYPES = ("llama4", "llama4_text")
IGNORED = ("vision_model.*", "multi_modal_projector.*", "*.rotary_emb.inv_freq")
COPIES: HFCopies = {}


def from_hf(settings: Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    settings = given(settings, "text_config", settings)
    only(settings, hidden_act=("silu",), router_jitter_noise=(0.0,))
    heads, dim = needed(settings, "num_attention_heads"), needed(settings, "hidden_size")
    return ModelConfig(
        vocab_size=needed(settings, "vocab_size"),
        dim=dim,
        num_layers=needed(settings, "num_hidden_layers"),
        hidden_dim=needed(settings, "intermediate_size_mlp"),
        attention=GQAConfig(
            num_heads=heads,
            num_kv_heads=given(settings, "num_key_value_heads", heads),
            head_dim=given(settings, "head_dim", dim // heads),
            qk_norm="unweighted" if given(settings, "use_qk_norm", True) else "none",
            bias=given(settings, "attention_bias", False),
            temperature=_temperature(settings),
        ),
        rope=rope_from_hf(settings, "neighbours"),
        local=_local(settings),
        moe_every=_moe_every(settings),
        moe=MoEConfig(
            num_experts=needed(settings, "num_local_experts"),
            top_k=needed(settings, "num_experts_per_tok"),
            hidden_dim=needed(settings, "intermediate_size"),
            num_shared_experts=1,
            score="sigmoid",
            weights_scale="inputs",
        ),
        tied_embeddings=given(settings, "tie_word_embeddings", False),
        max_seq_len=given(settings, "max_position_embeddings", 131_072),
        norm_eps=given(settings, "rms_norm_eps", 1e-5),
        init_std=given(settings, "initializer_range", 0.02),
    )


def _temperature(settings: Settings) -> PositionTemperature | None:
    # Published as the number 4 or as a boolean.
    if not given(settings, "attn_temperature_tuning", True):
        return None
    return PositionTemperature(
        scale=given(settings, "attn_scale", 0.1), floor=int(given(settings, "floor_scale", 8192))
    )


def _local(settings: Settings) -> LocalAttention:
    # Layers without rotary positions are those that see the whole row.
    every, num_layers = given(settings, "no_rope_layer_interval", 4), settings["num_hidden_layers"]
    rotates = settings.get("no_rope_layers") or [
        (layer + 1) % every != 0 for layer in range(num_layers)
    ]
    sees_all = [not each for each in rotates[:num_layers]]
    kinds = ["full_attention" if each else "chunked_attention" for each in sees_all]
    only(settings, layer_types=(kinds,))
    return LocalAttention(
        "chunk",
        given(settings, "attention_chunk_size", 8192),
        global_every=period("no_rope_layers", sees_all),
        global_rotary=False,
    )


def _moe_every(settings: Settings) -> int:
    layers = settings.get("moe_layers")
    if layers is None:
        return given(settings, "interleave_moe_layer_step", 1)
    has_experts = [layer in layers for layer in range(settings["num_hidden_layers"])]
    return period("moe_layers", has_experts)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    attention, moe = attention_of(config, GQAConfig, _FAMILY), experts_of(config, _FAMILY)
    layers = range(config.num_layers)
    temperature = attention.temperature or PositionTemperature(scale=0.1, floor=8192)
    return {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": moe.hidden_dim,
        "intermediate_size_mlp": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.bias,
        "attention_dropout": 0.0,
        "attention_chunk_size": config.max_seq_len if config.local is None else config.local.size,
        "no_rope_layers": [int(config.rotates(layer)) for layer in layers],
        "use_qk_norm": attention.qk_norm == "unweighted",
        "attn_temperature_tuning": attention.temperature is not None,
        "attn_scale": temperature.scale,
        "floor_scale": temperature.floor,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "interleave_moe_layer_step": config.moe_every,
        "moe_layers": [layer for layer in layers if config.is_moe_layer(layer)],
        "output_router_logits": False,
        "router_aux_loss_coef": moe.global_aux_loss_weight,
        "router_jitter_noise": 0.0,
        **rope_to_hf(config.rope),
    }


_PROJECTIONS = (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
_FEED_FORWARD: HFKeys = {
    f"{ours}.{w}.weight": (HFWeight(f"{theirs}.{projection}.weight"),)
    for ours, theirs in (
        ("feed_forward", "feed_forward"),
        ("moe.shared_experts", "feed_forward.shared_expert"),
    )
    for w, projection in _PROJECTIONS
}
_EXPERTS: HFKeys = {
    "moe.router.gate.weight": (HFWeight("feed_forward.router.weight"),),
    "moe.experts.w1": (
        HFWeight("feed_forward.experts.gate_up_proj", transposed=True, part="first half"),
    ),
    "moe.experts.w3": (
        HFWeight("feed_forward.experts.gate_up_proj", transposed=True, part="second half"),
    ),
    "moe.experts.w2": (HFWeight("feed_forward.experts.down_proj", transposed=True),),
}


def keys(config: ModelConfig) -> HFKeys:
    """Where each tensor is. Biases of the routing have no place."""
    attention = attention_of(config, GQAConfig, _FAMILY)
    block = {**BLOCK_NORMS, **GQA, **_FEED_FORWARD, **_EXPERTS}
    if attention.bias:
        block |= GQA_BIASES
    text = {**EMBEDDINGS, **in_layers(block)}
    return {
        name: (*ways, *(replace(way, name=f"language_model.{way.name}") for way in ways))
        for name, ways in text.items()
    }
