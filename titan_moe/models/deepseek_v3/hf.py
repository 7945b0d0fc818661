"""DeepSeek-V2 (softmax scores), DeepSeek-V3 (sigmoid scores and their bias) and models built like
them, from the config.json files of deepseek-ai/DeepSeek-V2-Lite, DeepSeek-V2 and DeepSeek-V3
(arXiv 2405.04434 and 2412.19437), moonshotai/Moonlight-16B-A3B (arXiv 2502.16982) and
moonshotai/Kimi-K2-Base (arXiv 2507.20534).

Kimi-K2 (`kimi_k2`) is a V3 by another name, and is written as one. What transformers' own code of a
version leaves out, whatever config.json says, is refused rather than trained differently.
"""

from dataclasses import replace

from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import MLAConfig, ModelConfig

MODEL_TYPES = ("deepseek_v3", "deepseek_v2", "kimi_k2")

_DENSE = hf.Form(
    family="deepseek_v3",
    architecture="DeepseekV3",
    attention=MLAConfig,
    keys=hf.MLA_KEYS,
    defaults={"q_lora_rank": None, "max_position_embeddings": 4096},
    rope=hf.LATENT_ROPE,
)
_V3 = replace(
    _DENSE,
    keys={**hf.MLA_KEYS, **hf.ROUTER_KEYS, "moe.score": "scoring_func"},
    defaults=_DENSE.defaults
    | {"n_shared_experts": 0, "first_k_dense_replace": 0, "n_group": 8, "topk_group": 4}
    | {"scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5},
)
_V2 = replace(
    _V3,
    model_type="deepseek_v2",
    architecture="DeepseekV2",
    defaults=_V3.defaults
    | {"n_group": 1, "topk_group": 1}
    | {"scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    fields={"moe.group_score_top": 1},
)


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    if not settings.get("n_routed_experts"):
        return _DENSE.config(_DENSE.read(settings))
    form, ungrouped = _V3, False
    if settings.get("model_type") == "deepseek_v2":
        form, ungrouped = _V2, hf.given(settings, "topk_method", "greedy") == "greedy"
        hf.only(settings, scoring_func=("softmax",), norm_topk_prob=(False,))
        hf.only(settings, topk_method=("greedy", "group_limited_greedy"))
    else:
        hf.only(settings, scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    fields = form.read(settings)
    if ungrouped or fields["moe.num_groups"] == 1:
        fields |= {"moe.num_groups": 1, "moe.top_groups": 1}
    return form.config(fields)


def to_hf(config: ModelConfig) -> hf.Settings:
    """A config.json of these dimensions."""
    moe = config.moe
    if moe is None:
        # transformers knows dense layers only as the first ones.
        return _DENSE.write(config, first_k_dense_replace=config.num_layers, n_routed_experts=0)
    by_groups = "noaux_tc" if _is_v3(config) else "group_limited_greedy"
    return (_V3 if _is_v3(config) else _V2).write(
        config,
        moe_layer_freq=config.moe_every,
        topk_method=by_groups if _is_v3(config) or moe.num_groups > 1 else "greedy",
    )


def _is_v3(config: ModelConfig) -> bool:
    """Chooses between the two published codes; V2's refuses all scores but softmax."""
    return config.moe is None or config.moe.score == "sigmoid"


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor. The routing's bias has a place beside sigmoid scores only (V3)."""
    bias = names.ROUTING_BIAS if _is_v3(config) else {}
    return names.in_model_with_mtp({**names.MLA_BLOCK, **bias})
