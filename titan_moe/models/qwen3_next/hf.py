"""Gated delta rule layers (arXiv 2412.06464) and gated attention, from the config.json file of
Qwen/Qwen3-Next-80B-A3B-Instruct.

The text models of Qwen3.5 and Qwen3.6 (`qwen3_5_moe`) differ in the names of their tensors alone.
They are read alone or inside the published models.

transformers leaves out multi-token prediction. Its one layer attends, has experts, and is built as
DeepSeek-V3's; config.json of Qwen3-Next does not count it, that of Qwen3.5 does.
"""

from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models.config import GatedDeltaConfig, GQAConfig, ModelConfig
from titan_moe.models.hf_rope import partial_rotary_factor, rope_from_hf

_FAMILY = "qwen3_next"
_QWEN3_5 = "qwen3_5_moe_text"
MODEL_TYPES = (_FAMILY, _QWEN3_5)

_KEYS = {
    **hf.GQA_KEYS,
    **hf.QWEN_EXPERT_KEYS,
    "num_mtp_layers": "mtp_num_hidden_layers",
}
_RECURRENT_KEYS = {
    "recurrent.num_key_heads": "linear_num_key_heads",
    "recurrent.num_value_heads": "linear_num_value_heads",
    "recurrent.key_dim": "linear_key_head_dim",
    "recurrent.value_dim": "linear_value_head_dim",
    "recurrent.conv_size": "linear_conv_kernel_dim",
}
_DEFAULTS = hf.DEFAULTS | {
    "max_position_embeddings": 32_768,
    "head_dim": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mtp_num_hidden_layers": 1,
}
_KINDS = ("linear_attention", "full_attention")


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    hf.only(settings, hidden_act=("silu",), mlp_only_layers=([],))
    # A layer of all experts has no other feed-forward.
    unread = {"intermediate_size": hf.needed(settings, "moe_intermediate_size")}
    fields = hf.read_fields(settings, _KEYS, hf.gqa_defaults(settings) | _DEFAULTS | unread)
    recurrent = hf.read_fields(settings, _RECURRENT_KEYS, {})
    rotated = partial_rotary_factor(settings, fields["attention.head_dim"], 0.25)
    fields |= {
        "attention.qk_norm": "learned",
        "attention.output_gate": True,
        "attention.partial_rotary_factor": rotated,
        "rope": rope_from_hf(settings, partial=True),
        "recurrent": GatedDeltaConfig(
            **{path.removeprefix("recurrent."): value for path, value in recurrent.items()},
            attention_every=_attention_every(settings),
            files_join_heads=settings.get("model_type", _FAMILY) == _FAMILY,
        ),
        "zero_centred_norms": True,
        "moe.num_shared_experts": _shared_experts(settings),
        "moe.shared_gate": True,
    }
    return hf.make_config(fields, GQAConfig)


def _attention_every(settings: hf.Settings) -> int:
    kinds, every = settings.get("layer_types"), hf.given(settings, "full_attention_interval", 4)
    if kinds is None:
        return every
    if unknown := set(kinds) - set(_KINDS):
        raise ConfigError(f"config.json: layer_types: only {' or '.join(_KINDS)}, not {unknown}")
    return hf.period("layer_types", [kind == "full_attention" for kind in kinds])


def _shared_experts(settings: hf.Settings) -> int:
    width, expert = hf.needed(settings, "shared_expert_intermediate_size"), "moe_intermediate_size"
    if width % settings[expert]:
        raise ConfigError(
            f"config.json: shared_expert_intermediate_size={width} must be a multiple of "
            f"{expert}={settings[expert]}"
        )
    return width // settings[expert]


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    attention = hf.attention_of(config, GQAConfig, _FAMILY)
    joined = hf.recurrent_of(config, _FAMILY).files_join_heads
    assert config.moe is not None
    attends = [not config.recurs(layer) for layer in range(config.num_layers)]
    return hf.settings_of(
        config,
        *(("Qwen3Next", _FAMILY) if joined else ("Qwen3_5Moe", _QWEN3_5)),
        _KEYS | _RECURRENT_KEYS,
        layer_types=[_KINDS[each] for each in attends],
        mlp_only_layers=[],
        partial_rotary_factor=attention.partial_rotary_factor,
        shared_expert_intermediate_size=config.moe.num_shared_experts * config.moe.hidden_dim,
    )


_SHARED = {
    **hf.renamed("moe.shared_experts.*.weight", "mlp.*.weight", {"gate": "shared_expert_gate"}),
    **hf.renamed("moe.shared_experts.*.weight", "mlp.shared_expert.*.weight", hf.PROJECTIONS),
}
_MTP = hf.renamed(
    "mtp.layers.{layer}.*.weight",
    "mtp.*.weight",
    {
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "projection": "fc",
        "norm": "norm",
    },
)
_RECURRENT = hf.renamed(
    "attention.*.weight",
    "linear_attn.*",
    {
        "decay.A_log": "A_log",
        "decay.dt_bias": "dt_bias",
        "out_norm": "norm.weight",
        "out_proj": "out_proj.weight",
    },
)


def keys(config: ModelConfig) -> hf.HFKeys:
    """Names of each tensor. Biases of the routing have no place, nor has a second layer of
    multi-token prediction."""
    recurrent = _recurrent(hf.recurrent_of(config, _FAMILY))
    block = {**hf.GQA_BLOCK, **hf.QK_NORMS, **recurrent}
    block |= {**hf.FEED_FORWARD, **hf.EXPERTS, **_SHARED}
    found = hf.in_model(block)
    if config.num_mtp_layers == 1:
        ahead = hf.in_layers(block, "mtp.layers.{layer}.block.", "mtp.layers.0.")
        found |= {**_MTP, **ahead}
    return found


def _recurrent(config: GatedDeltaConfig) -> hf.HFKeys:
    """Names of a recurrent layer's tensors. Qwen3-Next's projections lie one key head's after
    another; in Qwen3.5 the gates' have tensors of their own. Both are read, and the model's own
    form is written."""
    keys, values = config.key_dim, config.num_value_heads * config.value_dim
    each = values // config.num_key_heads
    heads = config.num_value_heads // config.num_key_heads
    mixed = _sections("linear_attn.in_proj_qkvz.weight", q=keys, k=keys, v=each, z=each)
    gates = _sections("linear_attn.in_proj_ba.weight", b=heads, a=heads)
    all_keys = keys * config.num_key_heads
    conv = _sections("linear_attn.conv1d.weight", q=all_keys, k=all_keys, v=values)
    joined = _sections("linear_attn.in_proj_qkv.weight", q=all_keys, k=all_keys, v=values)
    joined |= {gate: hf.HFWeight(f"linear_attn.in_proj_{gate}.weight") for gate in "zba"}
    order = 1 if config.files_join_heads else -1
    return {
        **_RECURRENT,
        **{f"attention.in_proj.{x}.weight": (way, joined[x])[::order] for x, way in mixed.items()},
        **{f"attention.gates.{x}.weight": (way, joined[x])[::order] for x, way in gates.items()},
        **{f"attention.conv.{x}.weight": (way,) for x, way in conv.items()},
    }


def _sections(name: str, **sizes: int) -> dict[str, hf.HFWeight]:
    """The parts of a tensor whose rows are groups of these sections."""
    found, first, size = {}, 0, sum(sizes.values())
    for section, rows in sizes.items():
        found[section] = hf.HFWeight(name, rows=hf.Rows(first, first + rows, size))
        first += rows
    return found
