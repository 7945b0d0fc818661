"""GLM-4.5, GLM-4.5-Air, GLM-4.6 (arXiv 2508.06471) and GLM-4.7-Flash, from the config.json files of
zai-org/GLM-4.5, zai-org/GLM-4.5-Air, zai-org/GLM-4.6 and zai-org/GLM-4.7-Flash.

Positions rotate half of each head's channels. GLM-4.7-Flash (`glm4_moe_lite`) has DeepSeek-V3's
latent attention instead, and the same experts.

transformers leaves out multi-token prediction; its layer here is built as DeepSeek-V3's.
"""

from dataclasses import replace

from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import MLAConfig, ModelConfig
from titan_moe.models.hf_rope import of_rope

_FORM = hf.Form(
    family="glm4_moe",
    architecture="Glm4Moe",
    keys={
        **hf.GQA_KEYS,
        **hf.ROUTER_KEYS,
        "num_mtp_layers": "num_nextn_predict_layers",
        "attention.partial_rotary_factor": "partial_rotary_factor",
    },
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
    },
    fields={"attention.output_bias": False, "moe.score": "sigmoid"},
    rope={"partial": True},
)
_LATENT = replace(
    _FORM,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLite",
    attention=MLAConfig,
    keys={**hf.MLA_KEYS, **hf.ROUTER_KEYS},
    defaults=_FORM.defaults
    | {"max_position_embeddings": 202_752, "routed_scaling_factor": 1.8, "q_lora_rank": None},
    fields={"moe.score": "sigmoid"},
    rope=hf.LATENT_ROPE,
)
MODEL_TYPES = ("glm4_moe", _LATENT.model_type, "glm4v_moe_text")


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    hf.only(settings, scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    if settings.get("model_type") == _LATENT.model_type:
        factor = of_rope(settings, "partial_rotary_factor", 1.0)
        hf.only({"partial_rotary_factor": factor}, partial_rotary_factor=(1.0,))
        return _LATENT.config(_LATENT.read(settings))
    normed = "learned" if hf.given(settings, "use_qk_norm", False) else "none"
    return _FORM.config(_FORM.read(settings) | {"attention.qk_norm": normed})


def to_hf(config: ModelConfig) -> hf.Settings:
    """A config.json of these dimensions."""
    if isinstance(config.attention, MLAConfig):
        return _LATENT.write(config, mlp_layer_types=hf.ffn_kinds(config))
    return _FORM.write(config, use_qk_norm=_FORM.attention_of(config).qk_norm == "learned")


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor."""
    # The experts are the same; names of the other attention take the place of the latent one's.
    is_latent = isinstance(config.attention, MLAConfig)
    gqa = {} if is_latent else {**names.GQA_BLOCK, **names.QK_NORMS}
    return names.in_model_with_mtp({**names.MLA_BLOCK, **gqa, **names.ROUTING_BIAS})
