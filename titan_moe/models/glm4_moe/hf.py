"""GLM-4.5, GLM-4.5-Air and GLM-4.6 (arXiv 2508.06471), from the config.json files of
zai-org/GLM-4.5, zai-org/GLM-4.5-Air and zai-org/GLM-4.6. Positions rotate half of each head's
channels.

transformers leaves out multi-token prediction; its layer here is built as DeepSeek-V3's.
"""

from typing import Any

from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.hf_family import (
    BLOCK_NORMS,
    DEFAULTS,
    EXPERTS,
    FEED_FORWARD,
    GQA,
    GQA_BIASES,
    GQA_KEYS,
    MTP_COPIES,
    QK_NORMS,
    ROUTER_KEYS,
    ROUTING_BIAS,
    SHARED_EXPERTS,
    HFKeys,
    Settings,
    attention_of,
    given,
    gqa_defaults,
    make_config,
    only,
    partial_rotary_factor,
    read_fields,
    rope_from_hf,
    rope_to_hf,
    with_mtp,
    write_fields,
)

_FAMILY = "glm4_moe"
MODEL_TYPES = ("glm4_moe",)
IGNORED: tuple[str, ...] = ()
COPIES = MTP_COPIES

_KEYS = {**GQA_KEYS, **ROUTER_KEYS, "num_mtp_layers": "num_nextn_predict_layers"}
_DEFAULTS = DEFAULTS | {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def from_hf(settings: Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    only(settings, hidden_act=("silu",), scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    mtp = {"num_nextn_predict_layers": given(settings, "num_mtp_layers", 1)}
    fields = read_fields(settings, _KEYS, _DEFAULTS | gqa_defaults(settings) | mtp)
    head_dim = fields["attention.head_dim"]
    fields |= {
        "attention.qk_norm": "learned" if given(settings, "use_qk_norm", False) else "none",
        "attention.output_bias": False,
        "attention.partial_rotary_factor": partial_rotary_factor(settings, head_dim, 0.5),
        "rope": rope_from_hf(settings),
        "moe.score": "sigmoid",
        "moe.group_score_top": 2 if fields["moe.num_groups"] > 1 else 1,
    }
    return make_config(fields, GQAConfig)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    attention = attention_of(config, GQAConfig, _FAMILY)
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "hidden_act": "silu",
        "partial_rotary_factor": attention.partial_rotary_factor,
        "use_qk_norm": attention.qk_norm == "learned",
        **write_fields(config, _KEYS),
        **rope_to_hf(config.rope),
    }


def keys(config: ModelConfig) -> HFKeys:
    """Names of each tensor."""
    attention_of(config, GQAConfig, _FAMILY)
    attention = {**GQA, **GQA_BIASES, **QK_NORMS}
    feed_forward = {**FEED_FORWARD, **SHARED_EXPERTS, **EXPERTS, **ROUTING_BIAS}
    return with_mtp({**BLOCK_NORMS, **attention, **feed_forward}, config.num_mtp_layers)
