"""MiMo-V2-Flash, from the config.json file of XiaomiMiMo/MiMo-V2-Flash.

Layers of the near past have twice the key/value heads, sinks and positions of their own; values
have fewer channels than keys, and a factor. Keys of the published file that transformers does not
read must say what it builds. Multi-token prediction is left out, as there.
"""

from typing import Any

from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.hf_rope import rope_table
from titan_moe.ops.local_attention import LocalAttention

MODEL_TYPES = ("mimo_v2_flash",)

_SLIDING = "sliding_attention"
_FORM = hf.Form(
    family="mimo_v2",
    model_type="mimo_v2_flash",
    architecture="MiMoV2Flash",
    attention=GQAConfig,
    keys={
        **hf.GQA_KEYS,
        **{path: key for path, key in hf.ROUTER_KEYS.items() if key != "first_k_dense_replace"},
        "attention.value_dim": "v_head_dim",
        "attention.value_scale": "attention_value_scale",
    },
    defaults={
        "head_dim": 192,
        "v_head_dim": 128,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "attention_value_scale": 0.707,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 0,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
    },
    fields={"attention.output_bias": False, "moe.score": "sigmoid"},
    rope=None,
)
_ROPE = {
    hf.FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
}


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    fields = _FORM.read(settings)
    layers, heads = fields["num_layers"], fields["attention.num_kv_heads"]
    attends = hf.attending(settings, _SLIDING, layers)
    if attends is None:
        attends = [layer == 0 or (layer + 1) % 6 == 0 for layer in range(layers)]
    kinds = hf.given(settings, "mlp_layer_types", ["dense"] + ["sparse"] * (layers - 1))
    dense = kinds.count("dense")
    hf.only(
        settings,
        mlp_layer_types=(["dense"] * dense + ["sparse"] * (layers - dense),),
        moe_layer_freq=([int(kind == "sparse") for kind in kinds],),
        hybrid_layer_pattern=([int(not full) for full in attends],),
        scoring_func=("sigmoid",),
        n_shared_experts=(0,),
        layernorm_epsilon=(fields["norm_eps"],),
        swa_num_attention_heads=(fields["attention.num_heads"],),
        swa_num_key_value_heads=(2 * heads,),
        swa_head_dim=(fields["attention.head_dim"],),
        swa_v_head_dim=(fields["attention.value_dim"],),
        add_swa_attention_sink_bias=(True,),
        add_full_attention_sink_bias=(False,),
    )
    tables = settings.get("rope_parameters")
    if tables is None:
        tables = _ROPE
        hf.only(settings, rope_theta=(5e6,), swa_rope_theta=(1e4,), partial_rotary_factor=(0.334,))
    for kind, name in ((hf.FULL, "attention"), (_SLIDING, "near")):
        table = {"partial_rotary_factor": 0.334, **hf.needed(tables, kind)}
        positions = {"rope_parameters": table}
        fields[f"{name}.rope"] = hf.rope_from_hf(positions, partial=True)
        factor = hf.rotary_factor(positions, fields["attention.head_dim"], 0.334)
        fields[f"{name}.partial_rotary_factor"] = factor
    # The published code counts the tokens before a token's own.
    before = settings.get("sliding_window_size")
    window = hf.given(settings, "sliding_window", 129) if before is None else before + 1
    fields |= {
        "near.local": LocalAttention("window", window),
        "near.num_kv_heads": 2 * heads,
        "near.sinks": True,
        "num_dense_layers": dense,
        "pattern": hf.pattern_of(attends, "n"),
    }
    return _FORM.config(fields)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    full, near = _FORM.attention_of(config), config.near
    assert isinstance(near, GQAConfig)
    layers = range(config.num_layers)
    return _FORM.write(
        config,
        layer_types=hf.kinds_of(config, _SLIDING),
        mlp_layer_types=["sparse" if config.is_moe_layer(n) else "dense" for n in layers],
        sliding_window=hf.near_size(config),
        rope_parameters={
            kind: rope_table(each.rope, each.partial_rotary_factor)
            for kind, each in ((hf.FULL, full), (_SLIDING, near))
        },
    )


_SINKS = names.either(
    names.renamed("attention.*.weight", "self_attn.*", {"sinks": "attention_sink_bias"}),
    names.renamed("attention.*.weight", "self_attn.*", {"sinks": "sinks"}),
)
_BLOCK = {
    **names.GQA_BLOCK,
    **_SINKS,
    **names.FEED_FORWARD,
    **names.EXPERTS,
    **names.ROUTING_BIAS,
}


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor."""
    return names.in_model(_BLOCK)
