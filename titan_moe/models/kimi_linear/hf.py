"""Kimi Linear (arXiv 2510.26692), from the config.json file of moonshotai/Kimi-Linear-48B-A3B-Base:
layers of Kimi Delta Attention, and of DeepSeek's latent attention without positions."""

from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models.config import GatedDeltaConfig, MLAConfig, ModelConfig
from titan_moe.models.hf_mla import MLA_KEYS, dense_layers, mla_block

_FAMILY = "kimi_linear"
MODEL_TYPES = (_FAMILY,)
IGNORED: tuple[str, ...] = ()
COPIES: hf.HFCopies = {}

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
_FIXED = {
    "hidden_act": "silu",
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
}


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    hf.only(settings, **{key: (value,) for key, value in _FIXED.items()})
    hf.only(settings, num_key_value_heads=(hf.needed(settings, "num_attention_heads"),))
    hf.only(settings, num_nextn_predict_layers=(0,))
    fields = hf.read_fields(settings, _KEYS, _DEFAULTS)
    fields |= {
        "num_dense_layers": dense_layers(settings, fields["num_dense_layers"]),
        "attention.rotary": False,
        "rope": hf.rope_from_hf(settings),
        "recurrent": _recurrent_layers(settings, fields["num_layers"]),
        "moe.score": "sigmoid",
        "moe.group_score_top": 2 if fields["moe.num_groups"] > 1 else 1,
    }
    return hf.make_config(fields, MLAConfig)


def _recurrent_layers(settings: hf.Settings, num_layers: int) -> GatedDeltaConfig:
    table = hf.needed(settings, "linear_attn_config")
    names = "head_dim", "num_heads", "short_conv_kernel_size", "full_attn_layers"
    dim, heads, size, numbers = (hf.needed(table, name) for name in names)
    attends = [number in numbers for number in range(1, num_layers + 1)]
    # The last layer attends in the published model, after two recurrent ones instead of three.
    every = hf.period("full_attn_layers", attends[:-1])
    last = attends[-1] and (not every or num_layers % every != 0)
    if not last:
        hf.period("full_attn_layers", attends)
    return GatedDeltaConfig(heads, heads, dim, dim, size, every, last, gate_rank=dim)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    attention, recurrent = _mixers(config)
    layers = range(1, config.num_layers + 1)
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": _FAMILY,
        **_FIXED,
        "num_key_value_heads": attention.num_heads,
        "linear_attn_config": {
            "full_attn_layers": [layer for layer in layers if not config.recurs(layer - 1)],
            "kda_layers": [layer for layer in layers if config.recurs(layer - 1)],
            "head_dim": recurrent.key_dim,
            "num_heads": recurrent.num_key_heads,
            "short_conv_kernel_size": recurrent.conv_size,
        },
        **hf.write_fields(config, _KEYS),
        **hf.rope_to_hf(config.rope),
    }


def _mixers(config: ModelConfig) -> tuple[MLAConfig, GatedDeltaConfig]:
    attention = hf.attention_of(config, MLAConfig, _FAMILY)
    if config.recurrent is None or config.moe is None:
        raise ConfigError([f"the Hugging Face form of {_FAMILY} has recurrent layers and experts"])
    return attention, config.recurrent


# The published form, then that of transformers 5 in memory.
_RECURRENT: hf.HFKeys = {
    **{
        f"attention.{ours}.weight": (hf.HFWeight(f"self_attn.{theirs}.weight"),)
        for ours, theirs in (
            ("in_proj.q", "q_proj"),
            ("in_proj.k", "k_proj"),
            ("in_proj.v", "v_proj"),
            ("narrow.z", "g_a_proj"),
            ("in_proj.z", "g_b_proj"),
            ("gates.b", "b_proj"),
            ("out_norm", "o_norm"),
            ("out_proj", "o_proj"),
        )
    },
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
    attention, recurrent = _mixers(config)
    width = recurrent.num_key_heads * recurrent.key_dim
    convolutions: hf.HFKeys = {
        f"attention.conv.{x}.weight": (
            hf.HFWeight(f"self_attn.{x}_conv1d.weight"),
            hf.HFWeight(
                "self_attn.conv1d.weight", part=hf.Rows(n * width, (n + 1) * width, 3 * width)
            ),
        )
        for n, x in enumerate("qkv")
    }
    block = {**mla_block(attention), **_RECURRENT, **convolutions}
    block |= {**hf.BLOCK_SPARSE_EXPERTS, **_FEED_FORWARD}
    return {**hf.EMBEDDINGS, **hf.in_layers(block)}
