"""GLM-4.5, GLM-4.5-Air and GLM-4.6 (arXiv 2508.06471), from the config.json files of
zai-org/GLM-4.5, zai-org/GLM-4.5-Air and zai-org/GLM-4.6. Positions rotate half of each head's
channels.

transformers leaves out multi-token prediction; its layer here is built as DeepSeek-V3's.
"""

from typing import Any

from titan_moe.models import hf_family as hf
from titan_moe.models.config import GQAConfig, ModelConfig

_FAMILY = "glm4_moe"
MODEL_TYPES = ("glm4_moe",)
IGNORED: tuple[str, ...] = ()
COPIES = hf.MTP_COPIES

_KEYS = {**hf.GQA_KEYS, **hf.ROUTER_KEYS, "num_mtp_layers": "num_nextn_predict_layers"}
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


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    hf.only(settings, hidden_act=("silu",), scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    mtp = {"num_nextn_predict_layers": hf.given(settings, "num_mtp_layers", 1)}
    fields = hf.read_fields(settings, _KEYS, _DEFAULTS | hf.gqa_defaults(settings) | mtp)
    head_dim = fields["attention.head_dim"]
    fields |= {
        "attention.qk_norm": "learned" if hf.given(settings, "use_qk_norm", False) else "none",
        "attention.output_bias": False,
        "attention.partial_rotary_factor": hf.partial_rotary_factor(settings, head_dim, 0.5),
        "rope": hf.rope_from_hf(settings),
        "moe.score": "sigmoid",
        "moe.group_score_top": 2 if fields["moe.num_groups"] > 1 else 1,
    }
    return hf.make_config(fields, GQAConfig)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    attention = hf.attention_of(config, GQAConfig, _FAMILY)
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "hidden_act": "silu",
        "partial_rotary_factor": attention.partial_rotary_factor,
        "use_qk_norm": attention.qk_norm == "learned",
        **hf.write_fields(config, _KEYS),
        **hf.rope_to_hf(config.rope),
    }


def keys(config: ModelConfig) -> hf.HFKeys:
    """Names of each tensor."""
    hf.attention_of(config, GQAConfig, _FAMILY)
    attention = {**hf.GQA, **hf.GQA_BIASES, **hf.QK_NORMS}
    feed_forward = {**hf.FEED_FORWARD, **hf.SHARED_EXPERTS, **hf.EXPERTS, **hf.ROUTING_BIAS}
    return hf.with_mtp({**hf.BLOCK_NORMS, **attention, **feed_forward}, config.num_mtp_layers)
