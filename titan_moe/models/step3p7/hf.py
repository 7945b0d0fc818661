"""Step-3.7-Flash's text model, from the config.json file of stepfun-ai/Step-3.7-Flash. It is read
alone (`step3p5`), or inside the published one (`step3p7`).

Layers of the near past have heads of their own number; each head's output has a gate. Activations
of some layers are clamped after their function. Multi-token prediction is left out.
"""

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import ModelConfig
from titan_moe.ops.activation import SWIGLU, Activation

MODEL_TYPES = ("step3p5", "step3p7")

_FORM = hf.Form(
    family="step3p7",
    model_type="step3p5",
    architecture="Step3p7",
    keys={
        **hf.GQA_KEYS,
        "moe.num_experts": "n_routed_experts",
        "moe.top_k": "num_experts_per_tok",
        "moe.hidden_dim": "moe_intermediate_size",
        "moe.route_scale": "moe_router_scaling_factor",
    },
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 128_000,
        "rms_norm_eps": 1e-5,
        "moe_router_scaling_factor": 1.0,
    },
    fixed={"mlp_bias": False},
    fields={
        "attention.qk_norm": "learned",
        "attention.gate": "heads",
        "zero_centred_norms": True,
        "moe.score": "sigmoid",
        "moe.normalize_top_k": True,
    },
    rope=None,
    aliases={
        "num_attention_groups": "num_key_value_heads",
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
    },
)


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    hf.only(settings, n_shared_experts=(1,), scoring_func=("sigmoid",), use_moe_router_bias=(True,))
    # transformers never ties this embedding.
    hf.only(settings, tie_word_embeddings=(False,))
    fields = _FORM.read(settings)
    layers, width = fields["num_layers"], "share_expert_dim"
    named = {**settings, width: hf.given(settings, width, 1280)}
    fields["moe.num_shared_experts"] = hf.shared_experts(named, width)
    attends = hf.attending(settings, hf.SLIDING, layers)
    fields |= _dense(settings, layers) | _limits(settings, layers)
    scalar, head_dim = settings.get("query_pre_attn_scalar"), fields["attention.head_dim"]
    fields["attention.scale"] = None if scalar in (None, head_dim) else scalar**-0.5
    for kind, name in ((hf.FULL, "attention"), (hf.SLIDING, "near")):
        if (full := kind == hf.FULL) in attends:
            positions = _positions(settings, kind, attends.index(full))
            fields |= hf.positions_of(name, positions, head_dim)
    if not all(attends):
        near = [layer for layer, full in enumerate(attends) if not full]
        fields |= hf.near_layers(attends, hf.needed(settings, "sliding_window"))
        fields["near.num_heads"] = _near_heads(settings, near, fields["attention.num_heads"])
    return _FORM.config(fields)


def _near_heads(settings: hf.Settings, layers: list[int], default: int) -> int:
    other = hf.given(settings, "attention_other_setting", {})
    heads = other.get("num_attention_heads", default)
    heads = hf.given(settings, "num_sliding_attention_heads", heads)
    return hf.of_layers(settings, layers, {"num_attention_heads": heads})["num_attention_heads"]


def _dense(settings: hf.Settings, layers: int) -> hf.Fields:
    """Returns the number of dense layers, which come first: three where no key tells."""
    kinds, named = settings.get("mlp_layer_types"), settings.get("moe_layers_enum")
    if kinds is None:
        numbers = named.split(",") if isinstance(named, str) else named
        sparse = range(3, layers) if numbers is None else {int(number) for number in numbers}
        kinds = ["sparse" if layer in sparse else "dense" for layer in range(layers)]
    first = hf.dense_layers(kinds[:layers], layers, "mlp_layer_types, moe_layers_enum")
    hf.only(settings, first_k_dense_replace=(first,))
    return {"num_dense_layers": first}


def _limits(settings: hf.Settings, layers: int) -> hf.Fields:
    """Returns the activations, with the limits of routed and of other feed-forwards."""
    keys = {"moe.activation": "swiglu_limits", "activation": "swiglu_limits_shared"}
    found: hf.Fields = {}
    for field, key in keys.items():
        limits = hf.given(settings, key, [])[:layers]
        limited = tuple(layer for layer, limit in enumerate(limits) if limit)
        if len({limits[layer] for layer in limited}) > 1:
            raise ConfigError(f"config.json: {key} may have one limit beside none: {limits}")
        found[field] = SWIGLU
        if limited:
            limit = float(limits[limited[0]])
            found[field] = Activation(limit=limit, clamps="after", limited_in=limited)
    return found


def _positions(settings: hf.Settings, kind: str, layer: int) -> hf.Settings:
    """Returns the keys of a kind of layers' positions. `layer`: one of them, whose entries in lists
    count for all."""
    if (tables := settings.get("rope_parameters")) is not None:
        table = dict(hf.needed(tables, kind))
    else:
        thetas, factors = (settings.get(k) for k in ("rope_theta", "partial_rotary_factors"))
        theta = thetas[layer] if isinstance(thetas, list) else thetas
        table = {"rope_theta": 1e4 if theta is None else theta}
        if factors:
            table["partial_rotary_factor"] = factors[layer]
        if kind == hf.FULL:
            table |= settings.get("rope_scaling") or {}
    longest = "max_position_embeddings"
    return {"rope_parameters": table, longest: hf.given(settings, longest, 128_000)}


def to_hf(config: ModelConfig) -> hf.Settings:
    """A config.json of these dimensions."""
    full, near, moe = _FORM.attention_of(config), config.near, config.moe
    assert moe is not None
    layers = range(config.num_layers)
    limits = {"swiglu_limits": moe.activation, "swiglu_limits_shared": config.activation}
    return _FORM.write(
        config,
        **_FORM.kinds_to_hf(config),
        num_sliding_attention_heads=near.num_heads if near else None,
        share_expert_dim=moe.num_shared_experts * moe.hidden_dim,
        mlp_layer_types=hf.ffn_kinds(config),
        query_pre_attn_scalar=full.head_dim if full.scale is None else full.scale**-2,
        **{key: [activation.of(n).limit for n in layers] for key, activation in limits.items()},
    )


_ATTENTION = names.renamed("attention.*.weight", "self_attn.*.weight", {"wg": "g_proj"})
_EXPERTS: names.HFKeys = {
    **names.renamed("moe.router.*", "moe.*", {"gate.weight": "gate.weight"}),
    **names.renamed("moe.router.*", "moe.*", {"expert_bias": "router_bias"}),
    **names.renamed("moe.experts.*", "moe.*.weight", names.PROJECTIONS),
    **names.renamed("moe.shared_experts.*.weight", "share_expert.*.weight", names.PROJECTIONS),
}
# The published form, then that of transformers 5 in memory.
_BLOCK = {
    **names.GQA_BLOCK,
    **names.QK_NORMS,
    **_ATTENTION,
    **names.FEED_FORWARD,
    **names.either(_EXPERTS, {**names.EXPERTS, **names.SHARED_EXPERTS, **names.ROUTING_BIAS}),
}


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor."""
    return names.in_model(_BLOCK)
