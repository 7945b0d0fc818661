"""Gated delta rule layers (arXiv 2412.06464) and gated attention, from the config.json file of
Qwen/Qwen3-Next-80B-A3B-Instruct.

The text models of Qwen3.5 and Qwen3.6 (`qwen3_5_moe`) differ in the names of their tensors alone.
They are read alone or inside the published models.

transformers leaves out multi-token prediction. Its one layer attends, has experts, and is built as
DeepSeek-V3's; config.json of Qwen3-Next does not count it, that of Qwen3.5 does.
"""

from dataclasses import replace

from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import ModelConfig
from titan_moe.models.recurrent_config import GatedDeltaConfig

_LINEAR, _SHARED_WIDTH = "linear_attention", "shared_expert_intermediate_size"
_FORM = hf.Form(
    family="qwen3_next",
    architecture="Qwen3Next",
    keys={
        **hf.GQA_KEYS,
        **hf.QWEN_EXPERT_KEYS,
        "num_mtp_layers": "mtp_num_hidden_layers",
        "attention.partial_rotary_factor": "partial_rotary_factor",
        "recurrent.num_key_heads": "linear_num_key_heads",
        "recurrent.num_value_heads": "linear_num_value_heads",
        "recurrent.key_dim": "linear_key_head_dim",
        "recurrent.value_dim": "linear_value_head_dim",
        "recurrent.conv_size": "linear_conv_kernel_dim",
    },
    defaults={
        "max_position_embeddings": 32_768,
        "head_dim": 256,
        "decoder_sparse_step": 1,
        "mtp_num_hidden_layers": 1,
        "partial_rotary_factor": 0.25,
    },
    fixed={"mlp_only_layers": []},
    fields={
        "attention.qk_norm": "learned",
        "attention.gate": "channels",
        "recurrent.files_join_heads": True,
        "zero_centred_norms": True,
        "moe.shared_gate": True,
    },
    rope={"partial": True},
)
_QWEN3_5 = replace(
    _FORM,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5Moe",
    fields=_FORM.fields | {"recurrent.files_join_heads": False},
)
MODEL_TYPES = ("qwen3_next", _QWEN3_5.model_type)


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    form = _QWEN3_5 if settings.get("model_type") == _QWEN3_5.model_type else _FORM
    # A layer of all experts has no other feed-forward.
    width = hf.needed(settings, "moe_intermediate_size")
    width = hf.given(settings, "intermediate_size", width)
    fields = form.read({**settings, "intermediate_size": width})
    every = hf.given(settings, "full_attention_interval", 4)
    attends = hf.attending(settings, _LINEAR, fields["num_layers"], every)
    fields["pattern"] = hf.pattern_of(attends, "r")
    fields["moe.num_shared_experts"] = hf.shared_experts(settings, _SHARED_WIDTH)
    return form.config(fields)


def to_hf(config: ModelConfig) -> hf.Settings:
    """A config.json of these dimensions."""
    joined = hf.recurrent_of(config, _FORM.family).files_join_heads
    assert config.moe is not None
    return (_FORM if joined else _QWEN3_5).write(
        config,
        layer_types=hf.kinds_of(config, _LINEAR),
        **{_SHARED_WIDTH: config.moe.num_shared_experts * config.moe.hidden_dim},
    )


_SHARED = {
    **names.renamed("moe.shared_experts.*.weight", "mlp.*.weight", {"gate": "shared_expert_gate"}),
    **names.renamed("moe.shared_experts.*.weight", "mlp.shared_expert.*.weight", names.PROJECTIONS),
}
_MTP = names.renamed(
    "mtp.layers.{layer}.*.weight",
    "mtp.*.weight",
    {
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "projection": "fc",
        "norm": "norm",
    },
)
_RECURRENT = names.renamed(
    "attention.*.weight",
    "linear_attn.*",
    {
        "decay.A_log": "A_log",
        "decay.dt_bias": "dt_bias",
        "out_norm": "norm.weight",
        "out_proj": "out_proj.weight",
    },
)
_GATES = {"in_proj.z": "in_proj_z", "gates.b": "in_proj_b", "gates.a": "in_proj_a"}


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor. Biases of the routing have no place, nor has a second layer of
    multi-token prediction."""
    recurrent = _recurrent(hf.recurrent_of(config, _FORM.family))
    block = {**names.GQA_BLOCK, **names.QK_NORMS, **recurrent}
    block |= {**names.FEED_FORWARD, **names.EXPERTS, **_SHARED}
    found = names.in_model(block)
    if config.num_mtp_layers == 1:
        ahead = names.in_layers(block, "mtp.layers.{layer}.block.", "mtp.layers.0.")
        found |= {**_MTP, **ahead}
    return found


def _recurrent(config: GatedDeltaConfig) -> names.HFKeys:
    """Names of a recurrent layer's tensors. Qwen3-Next's projections lie one key head's after
    another; in Qwen3.5 the gates' have tensors of their own. Both are read, and the model's own
    form is written."""
    keys, values = config.key_dim, config.num_value_heads * config.value_dim
    each = values // config.num_key_heads
    heads = config.num_value_heads // config.num_key_heads
    all_keys = keys * config.num_key_heads
    qkv = {"q": all_keys, "k": all_keys, "v": values}
    in_proj, gates, conv = (f"attention.{x}.*.weight" for x in ("in_proj", "gates", "conv"))
    mixed = {
        **names.sections(
            in_proj, "linear_attn.in_proj_qkvz.weight", q=keys, k=keys, v=each, z=each
        ),
        **names.sections(gates, "linear_attn.in_proj_ba.weight", b=heads, a=heads),
    }
    own = {
        **names.sections(in_proj, "linear_attn.in_proj_qkv.weight", **qkv),
        **names.renamed("attention.*.weight", "linear_attn.*.weight", _GATES),
    }
    forms = (mixed, own) if config.files_join_heads else (own, mixed)
    convolutions = names.sections(conv, "linear_attn.conv1d.weight", **qkv)
    return {**_RECURRENT, **names.either(*forms), **convolutions}
