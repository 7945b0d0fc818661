"""GLM-4.5, GLM-4.5-Air, GLM-4.6 (arXiv 2508.06471) and GLM-4.7-Flash, from the config.json files of
zai-org/GLM-4.5, zai-org/GLM-4.5-Air, zai-org/GLM-4.6 and zai-org/GLM-4.7-Flash.

Positions rotate half of each head's channels. GLM-4.7-Flash (`glm4_moe_lite`) has DeepSeek-V3's
latent attention instead, and the same experts.

transformers leaves out multi-token prediction; its layer here is built as DeepSeek-V3's.
"""

from typing import Any

from titan_moe.models import hf_family as hf
from titan_moe.models.config import GQAConfig, MLAConfig, ModelConfig
from titan_moe.models.hf_mla import MLA_BLOCK, MLA_KEYS, read_mla
from titan_moe.models.hf_rope import of_rope, partial_rotary_factor, rope_from_hf

_FAMILY = "glm4_moe"
_LATENT = "glm4_moe_lite"
MODEL_TYPES = (_FAMILY, _LATENT, "glm4v_moe_text")

_KEYS = {**hf.GQA_KEYS, **hf.ROUTER_KEYS, "num_mtp_layers": "num_nextn_predict_layers"}
_LATENT_KEYS = {**MLA_KEYS, **hf.ROUTER_KEYS}
_DEFAULTS = hf.DEFAULTS | {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT_DEFAULTS = {
    "max_position_embeddings": 202_752,
    "routed_scaling_factor": 1.8,
    "q_lora_rank": None,
}


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    hf.only(settings, hidden_act=("silu",), scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    mtp = {"num_nextn_predict_layers": hf.given(settings, "num_mtp_layers", 1)}
    latent = settings.get("model_type") == _LATENT
    if latent:
        factor = of_rope(settings, "partial_rotary_factor", 1.0)
        hf.only({"partial_rotary_factor": factor}, partial_rotary_factor=(1.0,))
        fields = read_mla(settings, _LATENT_KEYS, _DEFAULTS | mtp | _LATENT_DEFAULTS)
    else:
        fields = _fields(settings, _DEFAULTS | mtp)
    fields["moe.score"] = "sigmoid"
    fields["moe.group_score_top"] = 2 if fields["moe.num_groups"] > 1 else 1
    return hf.make_config(fields, MLAConfig if latent else GQAConfig)


def _fields(settings: hf.Settings, defaults: hf.Settings) -> hf.Fields:
    fields = hf.read_fields(settings, _KEYS, {**defaults, **hf.gqa_defaults(settings)})
    head_dim = fields["attention.head_dim"]
    return fields | {
        "attention.qk_norm": "learned" if hf.given(settings, "use_qk_norm", False) else "none",
        "attention.output_bias": False,
        "attention.partial_rotary_factor": partial_rotary_factor(settings, head_dim, 0.5),
        "rope": rope_from_hf(settings, partial=True),
    }


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    if isinstance(config.attention, MLAConfig):
        dense = config.num_dense_layers
        kinds = ["dense"] * dense + ["sparse"] * (config.num_layers - dense)
        names = ("Glm4MoeLite", _LATENT)
        return hf.settings_of(config, *names, _LATENT_KEYS, mlp_layer_types=kinds)
    attention = hf.attention_of(config, GQAConfig, _FAMILY)
    return hf.settings_of(
        config,
        "Glm4Moe",
        _FAMILY,
        _KEYS,
        partial_rotary_factor=attention.partial_rotary_factor,
        use_qk_norm=attention.qk_norm == "learned",
    )


def keys(config: ModelConfig) -> hf.HFKeys:
    """Names of each tensor."""
    # The experts are the same; names of the other attention take the place of the latent one's.
    gqa = {} if isinstance(config.attention, MLAConfig) else {**hf.GQA_BLOCK, **hf.QK_NORMS}
    return hf.in_model_with_mtp({**MLA_BLOCK, **gqa, **hf.ROUTING_BIAS})
