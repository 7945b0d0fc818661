"""Kimi Linear (arXiv 2510.26692), from the config.json file of moonshotai/Kimi-Linear-48B-A3B-Base:
layers of Kimi Delta Attention, and of DeepSeek's latent attention without positions.

config.json is read as published (`linear_attn_config`) and as transformers writes it since 5.17
(`layer_types`, `linear_head_dim`). It is written with the keys of both.
"""

from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models.config import GatedDeltaConfig, MLAConfig, ModelConfig
from titan_moe.models.hf_mla import MLA_BLOCK, MLA_KEYS, read_mla
from titan_moe.models.hf_rope import rope_from_hf

_FAMILY = "kimi_linear"
MODEL_TYPES = (_FAMILY,)

_KEYS = {
    **MLA_KEYS,
    **hf.ROUTER_KEYS,
    "max_seq_len": "model_max_length",
    "moe.num_experts": "num_experts",
    "moe.top_k": "num_experts_per_token",
    "moe.num_shared_experts": "num_shared_experts",
    "moe.normalize_top_k": "moe_renormalize",
    "moe.num_groups": "num_expert_group",
}
_DEFAULTS = hf.DEFAULTS | {
    "q_lora_rank": None,
    "rms_norm_eps": 1e-5,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 1,
}
# Names that transformers has for published keys.
_ALIASES = {
    "max_position_embeddings": "model_max_length",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
}
# Keys of linear_attn_config -> those that transformers writes in its place.
_STATES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_KINDS = ("linear_attention", "full_attention")
_FIXED = {
    "hidden_act": "silu",
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
}


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    published = {key: settings.get(name) for name, key in _ALIASES.items()}
    settings = published | {key: value for key, value in settings.items() if value is not None}
    hf.only(settings, **{key: (value,) for key, value in _FIXED.items()})
    # transformers' own Kimi Linear never ties its embedding.
    hf.only(settings, num_nextn_predict_layers=(0,), tie_word_embeddings=(False,))
    fields = read_mla(settings, _KEYS, _DEFAULTS)
    fields |= {
        "attention.rotary": False,
        "rope": rope_from_hf(settings),
        "recurrent": _recurrent_layers(settings, fields["num_layers"]),
        "moe.score": "sigmoid",
        "moe.group_score_top": 2 if fields["moe.num_groups"] > 1 else 1,
    }
    return hf.make_config(fields, MLAConfig)


def _recurrent_layers(settings: hf.Settings, num_layers: int) -> GatedDeltaConfig:
    kinds, table = settings.get("layer_types"), settings.get("linear_attn_config")
    if kinds is None:
        table = hf.needed(settings, "linear_attn_config")
        numbers = hf.needed(table, "full_attn_layers")
        kinds = [_KINDS[number in numbers] for number in range(1, num_layers + 1)]
    elif len(kinds) != num_layers or set(kinds) - set(_KINDS):
        raise ConfigError(
            f"config.json: layer_types: only {' or '.join(_KINDS)}, {num_layers} times: {kinds}"
        )
    table = table or {name: hf.needed(settings, key) for name, key in _STATES.items()}
    dim, heads, size = (hf.needed(table, name) for name in _STATES)
    attends = [kind == "full_attention" for kind in kinds]
    # The last layer attends in the published model, after two recurrent ones instead of three.
    every = hf.period("full_attn_layers", attends[:-1])
    last = attends[-1] and (not every or num_layers % every != 0)
    if not last:
        hf.period("full_attn_layers", attends)
    return GatedDeltaConfig(heads, heads, dim, dim, size, every, last, gate_rank=dim)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    hf.attention_of(config, MLAConfig, _FAMILY)
    recurrent = hf.recurrent_of(config, _FAMILY)
    layers = range(1, config.num_layers + 1)
    states = {
        "head_dim": recurrent.key_dim,
        "num_heads": recurrent.num_key_heads,
        "short_conv_kernel_size": recurrent.conv_size,
    }
    own = _FIXED | {
        "linear_attn_config": {
            "full_attn_layers": [layer for layer in layers if not config.recurs(layer - 1)],
            "kda_layers": [layer for layer in layers if config.recurs(layer - 1)],
            **states,
        },
        **{key: states[name] for name, key in _STATES.items()},
        "layer_types": [_KINDS[not config.recurs(layer - 1)] for layer in layers],
    }
    return hf.settings_of(config, "KimiLinear", _FAMILY, _KEYS, **own)


# The published form, then that of transformers 5 in memory.
_RECURRENT: hf.HFKeys = {
    **hf.renamed(
        "attention.*.weight",
        "self_attn.*.weight",
        {
            "in_proj.q": "q_proj",
            "in_proj.k": "k_proj",
            "in_proj.v": "v_proj",
            "narrow.z": "g_a_proj",
            "in_proj.z": "g_b_proj",
            "gates.b": "b_proj",
            "out_norm": "o_norm",
            "out_proj": "o_proj",
        },
    ),
    **{
        f"attention.{ours}.weight": tuple(
            hf.HFWeight(f"self_attn.{inside}{theirs}", ones=(2, 1) if theirs == "A_log" else (0, 0))
            for inside in ("", "forget_gate.")
        )
        for ours, theirs in (
            ("narrow.a", "f_a_proj.weight"),
            ("gates.a", "f_b_proj.weight"),
            ("decay.A_log", "A_log"),
            ("decay.dt_bias", "dt_bias"),
        )
    },
}


def _beside_experts(way: hf.HFWeight) -> hf.HFWeight:
    return hf.HFWeight(way.name.replace("mlp.", "block_sparse_moe."))


_MOE = {**hf.SHARED_EXPERTS, **hf.ROUTING_BIAS}
_FEED_FORWARD: hf.HFKeys = {
    **{name: (_beside_experts(way), way) for name, (way,) in _MOE.items()},
    # transformers writes dense layers by the experts' name too.
    **{name: (way, _beside_experts(way)) for name, (way,) in hf.FEED_FORWARD.items()},
}


def keys(config: ModelConfig) -> hf.HFKeys:
    """Names of each tensor."""
    recurrent = hf.recurrent_of(config, _FAMILY)
    width = recurrent.num_key_heads * recurrent.key_dim
    convolutions: hf.HFKeys = {
        f"attention.conv.{x}.weight": (
            hf.HFWeight(f"self_attn.{x}_conv1d.weight"),
            hf.HFWeight(
                "self_attn.conv1d.weight", rows=hf.Rows(n * width, (n + 1) * width, 3 * width)
            ),
        )
        for n, x in enumerate("qkv")
    }
    block = {**MLA_BLOCK, **_RECURRENT, **convolutions}
    block |= {**hf.BLOCK_SPARSE_EXPERTS, **_FEED_FORWARD}
    return hf.in_model(block)
