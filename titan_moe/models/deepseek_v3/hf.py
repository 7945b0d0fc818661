"""DeepSeek-V2 (softmax scores), DeepSeek-V3 (sigmoid scores and their bias) and models built like
them, from the config.json files of deepseek-ai/DeepSeek-V2-Lite, DeepSeek-V2 and DeepSeek-V3
(arXiv 2405.04434 and 2412.19437), moonshotai/Moonlight-16B-A3B (arXiv 2502.16982) and
moonshotai/Kimi-K2-Base (arXiv 2507.20534).

Kimi-K2 (`kimi_k2`) is a V3 by another name, and is written as one. What transformers' own code of a
version leaves out, whatever config.json says, is refused rather than trained differently.
"""

from typing import Any

from titan_moe.models import hf_family as hf
from titan_moe.models.config import MLAConfig, ModelConfig
from titan_moe.models.hf_mla import MLA_BLOCK, MLA_KEYS, read_mla

MODEL_TYPES = ("deepseek_v3", "deepseek_v2", "kimi_k2")

_EXPERT_KEYS = {**hf.ROUTER_KEYS, "moe.score": "scoring_func"}
_DEFAULTS = hf.DEFAULTS | {
    "q_lora_rank": None,
    "max_position_embeddings": 4096,
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
_V2 = {"scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0}
_V3 = {"scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5}
_V3 |= {"n_group": 8, "topk_group": 4}


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    hf.only(settings, hidden_act=("silu",))
    fields = read_mla(settings, MLA_KEYS, _DEFAULTS)
    if settings.get("n_routed_experts"):
        fields = _experts(settings) | fields
    return hf.make_config(fields, MLAConfig)


def _experts(settings: hf.Settings) -> hf.Fields:
    is_v3 = settings.get("model_type") != "deepseek_v2"
    if is_v3:
        hf.only(settings, scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    else:
        hf.only(settings, scoring_func=("softmax",), norm_topk_prob=(False,))
        hf.only(settings, topk_method=("greedy", "group_limited_greedy"))
    fields = hf.read_fields(settings, _EXPERT_KEYS, _DEFAULTS | (_V3 if is_v3 else _V2))
    ungrouped = not is_v3 and hf.given(settings, "topk_method", "greedy") == "greedy"
    if ungrouped or fields["moe.num_groups"] == 1:
        fields |= {"moe.num_groups": 1, "moe.top_groups": 1}
    fields["moe.group_score_top"] = 2 if is_v3 and fields["moe.num_groups"] > 1 else 1
    return fields


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    hf.attention_of(config, MLAConfig, "deepseek_v3")
    is_v3, moe = _is_v3(config), config.moe
    names = ("DeepseekV3", "deepseek_v3") if is_v3 else ("DeepseekV2", "deepseek_v2")
    settings = hf.settings_of(config, *names, MLA_KEYS)
    if moe is None:
        # transformers knows dense layers only as the first ones.
        return settings | {"first_k_dense_replace": config.num_layers, "n_routed_experts": 0}
    by_groups = "noaux_tc" if is_v3 else "group_limited_greedy"
    return {
        **settings,
        **hf.write_fields(config, _EXPERT_KEYS),
        "moe_layer_freq": config.moe_every,
        "topk_method": by_groups if is_v3 or moe.num_groups > 1 else "greedy",
    }


def _is_v3(config: ModelConfig) -> bool:
    """Chooses between the two published codes; V2's refuses all scores but softmax."""
    return config.moe is None or config.moe.score == "sigmoid"


def keys(config: ModelConfig) -> hf.HFKeys:
    """Names of each tensor. The routing's bias has a place beside sigmoid scores only (V3)."""
    bias = hf.ROUTING_BIAS if _is_v3(config) else {}
    return hf.in_model_with_mtp({**MLA_BLOCK, **bias})
