"""Step-3.7-Flash's text model, from the config.json file of stepfun-ai/Step-3.7-Flash. It is read
alone (`step3p5`), or inside the published one (`step3p7`).

Layers of the near past have heads of their own number; each head's output has a gate. Activations
of some layers are clamped after their function. Multi-token prediction is left out.
"""

from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import GQAConfig, ModelConfig, RopeConfig
from titan_moe.models.hf_rope import rope_table
from titan_moe.ops.activation import SWIGLU, Activation
from titan_moe.ops.local_attention import LocalAttention

MODEL_TYPES = ("step3p5", "step3p7")

_SLIDING = "sliding_attention"
_FORM = hf.Form(
    family="step3p7",
    model_type="step3p5",
    architecture="Step3p7",
    attention=GQAConfig,
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
    attends = hf.attending(settings, _SLIDING, layers) or [True] * layers
    fields |= _dense(settings, layers) | _limits(settings, layers)
    scalar, head_dim = settings.get("query_pre_attn_scalar"), fields["attention.head_dim"]
    fields["attention.scale"] = None if scalar in (None, head_dim) else scalar**-0.5
    for kind, name in ((hf.FULL, "attention"), (_SLIDING, "near")):
        if (full := kind == hf.FULL) in attends:
            layer = attends.index(full)
            rope, factor = _rope(settings, kind, layer, head_dim)
            fields |= {f"{name}.rope": rope, f"{name}.partial_rotary_factor": factor}
    if not all(attends):
        near = [layer for layer, full in enumerate(attends) if not full]
        fields["near.local"] = LocalAttention("window", hf.needed(settings, "sliding_window"))
        fields["near.num_heads"] = _near_heads(settings, near, fields["attention.num_heads"])
        fields["pattern"] = hf.pattern_of(attends, "n")
    return _FORM.config(fields)


def _near_heads(settings: hf.Settings, layers: list[int], default: int) -> int:
    other = hf.given(settings, "attention_other_setting", {})
    heads = other.get("num_attention_heads", default)
    heads = hf.given(settings, "num_sliding_attention_heads", heads)
    return hf.of_layers(settings, layers, {"num_attention_heads": heads})["num_attention_heads"]


def _dense(settings: hf.Settings, layers: int) -> hf.Fields:
    """Returns the number of dense layers, which come first: three where no key tells."""
    kinds, named = settings.get("mlp_layer_types"), settings.get("moe_layers_enum")
    dense = [layer < 3 for layer in range(layers)]
    if kinds is not None:
        dense = [kind == "dense" for kind in kinds[:layers]]
    elif named is not None:
        numbers = named.split(",") if isinstance(named, str) else named
        dense = [layer not in {int(each) for each in numbers} for layer in range(layers)]
    first = sum(dense)
    if dense != [layer < first for layer in range(layers)]:
        raise ConfigError("config.json: mlp_layer_types, moe_layers_enum: only dense layers first")
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


def _rope(settings: hf.Settings, kind: str, layer: int, head_dim: int) -> tuple[RopeConfig, float]:
    """Returns the positions of a kind of layers, and the share of a head's channels that they
    rotate. `layer`: one of them, whose entries in lists count for all."""
    if (tables := settings.get("rope_parameters")) is not None:
        table = dict(hf.needed(tables, kind))
    else:
        thetas, factors = (settings.get(k) for k in ("rope_theta", "partial_rotary_factors"))
        theta = thetas[layer] if isinstance(thetas, list) else thetas
        table = {"rope_theta": hf.given({"": theta}, "", 1e4)}
        if factors:
            table["partial_rotary_factor"] = factors[layer]
        if kind == hf.FULL:
            table |= settings.get("rope_scaling") or {}
    longest = "max_position_embeddings"
    positions = {"rope_parameters": table, longest: hf.given(settings, longest, 128_000)}
    factor = hf.rotary_factor(positions, head_dim, 1.0)
    return hf.rope_from_hf(positions, partial=True), factor


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    full, near, moe = _FORM.attention_of(config), config.near, config.moe
    assert moe is not None
    kinds = {hf.FULL: full, **({_SLIDING: near} if near else {})}
    layers = range(config.num_layers)
    limits = {"swiglu_limits": moe.activation, "swiglu_limits_shared": config.activation}
    return _FORM.write(
        config,
        layer_types=hf.kinds_of(config, _SLIDING),
        sliding_window=hf.near_size(config),
        num_sliding_attention_heads=near.num_heads if near else None,
        share_expert_dim=moe.num_shared_experts * moe.hidden_dim,
        mlp_layer_types=["sparse" if config.is_moe_layer(n) else "dense" for n in layers],
        query_pre_attn_scalar=full.head_dim if full.scale is None else full.scale**-2,
        rope_parameters={
            kind: rope_table(each.rope, each.partial_rotary_factor) for kind, each in kinds.items()
        },
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
