"""Gemma 4 with experts, from the `text_config` that google/gemma-4-26B-A4B is published with. The
text model is read alone (`gemma4_text`), or inside the published one (`gemma4`).

Layers that see the whole past have heads of their own, whose values are their keys, and positions
that turn a share of each head's pairs. A dense feed-forward runs beside the experts.
"""

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import GQAConfig, ModelConfig, RopeConfig
from titan_moe.ops.activation import Activation

MODEL_TYPES = ("gemma4_text",)

_GELU = Activation("gelu_tanh")
_FORM = hf.Form(
    family="gemma4",
    model_type="gemma4_text",
    architecture="Gemma4",
    keys={
        **hf.GQA_KEYS,
        "moe.num_experts": "num_experts",
        "moe.top_k": "top_k_experts",
        "moe.hidden_dim": "moe_intermediate_size",
        "logit_cap": "final_logit_softcapping",
    },
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "final_logit_softcapping": None,
    },
    # What transformers takes where config.json has none of these keys is another model.
    required={
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    fixed={"num_kv_shared_layers": 0, "use_double_wide_mlp": False},
    fields={
        "attention.qk_norm": "learned",
        "attention.v_norm": True,
        "attention.scale": 1.0,
        "activation": _GELU,
        "moe.activation": _GELU,
        "moe.normalize_top_k": True,
        "dense_beside_experts": True,
        "sandwich_norms": True,
        "layer_scales": True,
    },
    rope=None,
)
_ROPE = {
    hf.FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    hf.SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    hf.only(settings, use_bidirectional_attention=("vision",))
    fields = _FORM.read(settings)
    ropes, layers = hf.given(settings, "rope_parameters", _ROPE), fields["num_layers"]
    attends = hf.attending(settings, hf.SLIDING, layers, every=6)
    if not attends[-1]:
        raise ConfigError(f"config.json: layer_types: the last of {layers} must be {hf.FULL}")
    shares = hf.given(settings, "attention_k_eq_v", False)
    fields |= {
        **hf.near_layers(attends, hf.given(settings, "sliding_window", 512)),
        "near.num_kv_heads": fields["attention.num_kv_heads"],
        "near.head_dim": fields["attention.head_dim"],
        "near.rope": _rope(ropes, hf.SLIDING),
        "near.shares_kv": False,
        "attention.rope": _rope(ropes, hf.FULL),
        "attention.shares_kv": shares,
        "embedding_scale": fields["dim"] ** 0.5,
        "moe.stream_eps": fields["norm_eps"],
    }
    own = {"head_dim": hf.given(settings, "global_head_dim", 512)}
    if shares and settings.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = settings["num_global_key_value_heads"]
    own = hf.of_layers(settings, [n for n, full in enumerate(attends) if full], own)
    fields["attention.head_dim"] = own["head_dim"]
    fields["attention.num_kv_heads"] = own.get("num_key_value_heads", fields["near.num_kv_heads"])
    return _FORM.config(fields)


def _rope(tables: hf.Settings, kind: str) -> RopeConfig:
    table = hf.needed(tables, kind)
    if table.get("rope_type") != "proportional":
        return hf.rope_from_hf({"rope_parameters": table})
    hf.only(table, factor=(1.0,))
    return RopeConfig(
        float(hf.needed(table, "rope_theta")), share=hf.given(table, "partial_rotary_factor", 1.0)
    )


def to_hf(config: ModelConfig) -> hf.Settings:
    """A config.json of these dimensions."""
    full, near = _FORM.attention_of(config), config.near
    assert isinstance(near, GQAConfig)
    settings = _FORM.write(
        config,
        **_FORM.kinds_to_hf(config),
        attention_k_eq_v=full.shares_kv,
        global_head_dim=full.head_dim,
        num_global_key_value_heads=full.num_kv_heads,
    )
    del settings["hidden_act"]
    return settings | {"head_dim": near.head_dim, "num_key_value_heads": near.num_kv_heads}


_BLOCK: names.HFKeys = {
    **names.GQA_BLOCK,
    **names.QK_NORMS,
    **names.FEED_FORWARD,
    **names.stacks("experts"),
    **names.renamed(
        "*_norm.weight",
        "*.weight",
        {
            "attention": "input_layernorm",
            "post_attention": "post_attention_layernorm",
            "ffn": "pre_feedforward_layernorm",
            "post_ffn": "post_feedforward_layernorm",
            "moe": "pre_feedforward_layernorm_2",
            "post_dense": "post_feedforward_layernorm_1",
            "post_moe": "post_feedforward_layernorm_2",
        },
    ),
    **names.renamed(
        "moe.router.*",
        "router.*",
        {"gate.weight": "proj.weight", "scale": "scale", "weigh.scale": "per_expert_scale"},
    ),
    "scale": (names.HFWeight("layer_scalar"),),
}


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor. Biases of the routing have no place."""
    return names.in_model(_BLOCK)
