"""MiniMax-M2, from the config.json file of MiniMaxAI/MiniMax-M2. Its queries are normed over all
heads together, and so are its keys; positions rotate half of each head's channels.

That file names multi-token prediction layers, whose weights are not published: there are none here.
"""

from typing import Any

from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.hf_family import (
    BLOCK_NORMS,
    BLOCK_SPARSE_EXPERTS,
    BLOCK_SPARSE_KEYS,
    DEFAULTS,
    EMBEDDINGS,
    GQA,
    HFCopies,
    HFKeys,
    HFWeight,
    Settings,
    attention_of,
    given,
    in_layers,
    make_config,
    only,
    partial_rotary_factor,
    read_fields,
    rope_from_hf,
    rope_to_hf,
    write_fields,
)

_FAMILY = "minimax_m2"
MODEL_TYPES = ("minimax_m2",)
IGNORED: tuple[str, ...] = ()
COPIES: HFCopies = {}

_DEFAULTS = DEFAULTS | {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196_608,
}
_FIXED = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
    "router_jitter_noise": 0.0,
}


def from_hf(settings: Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    kinds = sorted(set(given(settings, "attn_type_list", [1])))
    fixed = {key: (value,) for key, value in _FIXED.items()}
    only({**settings, "attn_type_list": kinds}, attn_type_list=([1],), **fixed)
    only(settings, attention_bias=(False,), sliding_window=(None,))
    fields = read_fields(settings, BLOCK_SPARSE_KEYS, _DEFAULTS)
    head_dim = fields["attention.head_dim"]
    rotated = given(settings, "rotary_dim", head_dim) / head_dim
    fields |= {
        "attention.qk_norm": "across_heads",
        "attention.partial_rotary_factor": partial_rotary_factor(settings, head_dim, rotated),
        "rope": rope_from_hf({"rope_theta": 5e6, **settings}),
        "moe.score": "sigmoid",
        "moe.normalize_top_k": True,
    }
    return make_config(fields, GQAConfig)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    attention = attention_of(config, GQAConfig, _FAMILY)
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        **_FIXED,
        "rotary_dim": attention.rope_dim,
        **write_fields(config, BLOCK_SPARSE_KEYS),
        **rope_to_hf(config.rope),
    }


_ATTENTION: HFKeys = {
    **GQA,
    "attention.wq_norm.weight": (HFWeight("self_attn.q_norm.weight"),),
    "attention.wk_norm.weight": (HFWeight("self_attn.k_norm.weight"),),
}
# As published, then as transformers 5 keeps it in memory.
_ROUTING_BIAS: HFKeys = {
    "moe.router.expert_bias": (
        HFWeight("block_sparse_moe.e_score_correction_bias"),
        HFWeight("mlp.e_score_correction_bias"),
    )
}


def keys(config: ModelConfig) -> HFKeys:
    """Names of each tensor."""
    attention_of(config, GQAConfig, _FAMILY)
    block = {**BLOCK_NORMS, **_ATTENTION, **BLOCK_SPARSE_EXPERTS, **_ROUTING_BIAS}
    return {**EMBEDDINGS, **in_layers(block)}
