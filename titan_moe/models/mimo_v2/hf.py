"""MiMo-V2-Flash, from the config.json file of XiaomiMiMo/MiMo-V2-Flash.

Layers of the near past have twice the key/value heads, sinks and positions of their own; values
have fewer channels than keys, and a factor. Keys of the published file that transformers does not
read must say what it builds. Multi-token prediction is left out, as there.
"""

from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import ModelConfig

MODEL_TYPES = ("mimo_v2_flash",)

_FORM = hf.Form(
    family="mimo_v2",
    model_type="mimo_v2_flash",
    architecture="MiMoV2Flash",
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
    },
    fields={"attention.output_bias": False, "moe.score": "sigmoid"},
    rope=None,
)
_ROPE = {hf.FULL: {"rope_theta": 5e6}, hf.SLIDING: {"rope_theta": 1e4}}


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    fields = _FORM.read(settings)
    layers, heads = fields["num_layers"], fields["attention.num_kv_heads"]
    attends = hf.attending(settings, hf.SLIDING, layers, every=6)
    if settings.get("layer_types") is None:
        attends[0] = True
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
    for kind, name in ((hf.FULL, "attention"), (hf.SLIDING, "near")):
        table = {"partial_rotary_factor": 0.334, **hf.needed(tables, kind)}
        fields |= hf.positions_of(name, {"rope_parameters": table}, fields["attention.head_dim"])
    # The published code counts the tokens before a token's own.
    before = settings.get("sliding_window_size")
    window = hf.given(settings, "sliding_window", 129) if before is None else before + 1
    fields |= {
        **hf.near_layers(attends, window),
        "near.num_kv_heads": 2 * heads,
        "near.sinks": True,
        "num_dense_layers": dense,
    }
    return _FORM.config(fields)


def to_hf(config: ModelConfig) -> hf.Settings:
    """A config.json of these dimensions."""
    kinds = _FORM.kinds_to_hf(config)
    return _FORM.write(config, **kinds, mlp_layer_types=hf.ffn_kinds(config))


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
