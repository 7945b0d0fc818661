"""Kimi Linear (arXiv 2510.26692), from the config.json file of moonshotai/Kimi-Linear-48B-A3B-Base:
layers of Kimi Delta Attention, and of DeepSeek's latent attention without positions.

config.json is read as published (`linear_attn_config`) and as transformers writes it since 5.17
(`layer_types`, `linear_head_dim`). It is written with the keys of both.
"""

from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import MLAConfig, ModelConfig
from titan_moe.models.recurrent_config import GatedDeltaConfig

MODEL_TYPES = ("kimi_linear",)

# Keys that transformers writes -> the published ones.
_PUBLISHED = {
    "max_position_embeddings": "model_max_length",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
}
_ROUTER_KEYS = hf.ROUTER_KEYS | {"moe.num_experts": "num_local_experts"}
_FORM = hf.Form(
    family="kimi_linear",
    architecture="KimiLinear",
    attention=MLAConfig,
    keys={path: _PUBLISHED.get(key, key) for path, key in (hf.MLA_KEYS | _ROUTER_KEYS).items()},
    defaults={
        "q_lora_rank": None,
        "rms_norm_eps": 1e-5,
        "num_expert_group": 1,
        "moe_renormalize": True,
        "first_k_dense_replace": 1,
    },
    fixed={
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
    },
    fields={"moe.score": "sigmoid"},
    rope=None,
    aliases=_PUBLISHED,
)
# Keys of linear_attn_config -> those that transformers writes in its place.
_STATES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_LINEAR = "linear_attention"


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    # transformers' own Kimi Linear never ties its embedding.
    hf.only(settings, tie_word_embeddings=(False,))
    hf.only(settings, num_nextn_predict_layers=(0,), num_mtp_layers=(0,))
    fields = _FORM.read(settings)
    return _FORM.config(fields | _recurrent_layers(settings, fields["num_layers"]))


def _recurrent_layers(settings: hf.Settings, num_layers: int) -> hf.Fields:
    table, attends = settings.get("linear_attn_config"), hf.attending(settings, _LINEAR, num_layers)
    if settings.get("layer_types") is None:
        numbers = hf.needed(hf.needed(settings, "linear_attn_config"), "full_attn_layers")
        attends = [number in numbers for number in range(1, num_layers + 1)]
    table = table or {name: hf.needed(settings, key) for name, key in _STATES.items()}
    dim, heads, size = (hf.needed(table, name) for name in _STATES)
    recurrent = GatedDeltaConfig(heads, heads, dim, dim, size, gate_rank=dim)
    return {"recurrent": recurrent, "pattern": hf.pattern_of(attends, "r")}


def to_hf(config: ModelConfig) -> hf.Settings:
    """A config.json of these dimensions."""
    recurrent = hf.recurrent_of(config, _FORM.family)
    kinds = hf.kinds_of(config, _LINEAR)
    states = recurrent.key_dim, recurrent.num_key_heads, recurrent.conv_size
    return _FORM.write(
        config,
        linear_attn_config={
            "full_attn_layers": [n for n, kind in enumerate(kinds, 1) if kind == hf.FULL],
            "kda_layers": [n for n, kind in enumerate(kinds, 1) if kind == _LINEAR],
            **dict(zip(_STATES, states, strict=True)),
        },
        layer_types=kinds,
        **dict(zip(_STATES.values(), states, strict=True)),
    )


_RECURRENT = names.renamed(
    "attention.*.weight",
    "self_attn.*.weight",
    {
        **{f"in_proj.{x}": f"{x}_proj" for x in "qkv"},
        "narrow.z": "g_a_proj",
        "in_proj.z": "g_b_proj",
        "gates.b": "b_proj",
        "out_norm": "o_norm",
        "out_proj": "o_proj",
    },
)
_DECAY = {
    "narrow.a": "f_a_proj.weight",
    "gates.a": "f_b_proj.weight",
    "decay.dt_bias": "dt_bias",
}


def _decay(module: str) -> names.HFKeys:
    found = names.renamed("attention.*.weight", f"{module}.*", _DECAY)
    log = names.HFWeight(f"{module}.A_log", ones=(2, 1))
    return {**found, "attention.decay.A_log.weight": (log,)}


def _beside_experts(keys: names.HFKeys) -> names.HFKeys:
    return {
        name: (names.HFWeight(way.name.replace("mlp.", "block_sparse_moe.")),)
        for name, (way,) in keys.items()
    }


_MOE = {**names.SHARED_EXPERTS, **names.ROUTING_BIAS}
# The published form, then that of transformers 5 in memory.
_BLOCK = {
    **names.MLA_BLOCK,
    **_RECURRENT,
    **names.either(_decay("self_attn"), _decay("self_attn.forget_gate")),
    **names.BLOCK_SPARSE_EXPERTS,
    **names.either(_beside_experts(_MOE), _MOE),
    # transformers writes dense layers by the experts' name too.
    **names.either(names.FEED_FORWARD, _beside_experts(names.FEED_FORWARD)),
}


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor."""
    recurrent = hf.recurrent_of(config, _FORM.family)
    width, conv = recurrent.num_key_heads * recurrent.key_dim, "attention.conv.*.weight"
    own = names.renamed(conv, "self_attn.*_conv1d.weight", {x: x for x in "qkv"})
    joined = names.sections(conv, "self_attn.conv1d.weight", q=width, k=width, v=width)
    return names.in_model({**_BLOCK, **names.either(own, joined)})
