"""MiniMax-M2, from the config.json file of MiniMaxAI/MiniMax-M2. Its queries are normed over all
heads together, and so are its keys; positions rotate half of each head's channels.

That file names multi-token prediction layers, whose weights are not published: there are none here.
"""

from typing import Any

from titan_moe.models import hf_family as hf
from titan_moe.models.config import GQAConfig, ModelConfig
from titan_moe.models.hf_rope import partial_rotary_factor, rope_from_hf

MODEL_TYPES = ("minimax_m2",)

_DEFAULTS = hf.DEFAULTS | {
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


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    kinds = sorted(set(hf.given(settings, "attn_type_list", [1])))
    fixed = {key: (value,) for key, value in _FIXED.items()}
    hf.only({**settings, "attn_type_list": kinds}, attn_type_list=([1],), **fixed)
    hf.only(settings, attention_bias=(False,), sliding_window=(None,))
    fields = hf.read_fields(settings, hf.BLOCK_SPARSE_KEYS, _DEFAULTS)
    head_dim = fields["attention.head_dim"]
    rotated = hf.given(settings, "rotary_dim", head_dim) / head_dim
    fields |= {
        "attention.qk_norm": "across_heads",
        "attention.partial_rotary_factor": partial_rotary_factor(settings, head_dim, rotated),
        "rope": rope_from_hf({"rope_theta": 5e6, **settings}, partial=True),
        "moe.score": "sigmoid",
        "moe.normalize_top_k": True,
    }
    return hf.make_config(fields, GQAConfig)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    attention = hf.attention_of(config, GQAConfig, "minimax_m2")
    own = _FIXED | {"rotary_dim": attention.rope_dim}
    return hf.settings_of(config, "MiniMaxM2", "minimax_m2", hf.BLOCK_SPARSE_KEYS, **own)


_NORMS = hf.renamed(
    "attention.*.weight", "self_attn.*.weight", {"wq_norm": "q_norm", "wk_norm": "k_norm"}
)
# The published form, then that of transformers 5 in memory.
_ROUTING_BIAS: hf.HFKeys = {
    "moe.router.expert_bias": (
        hf.HFWeight("block_sparse_moe.e_score_correction_bias"),
        hf.HFWeight("mlp.e_score_correction_bias"),
    )
}


def keys(config: ModelConfig) -> hf.HFKeys:
    """Names of each tensor."""
    experts = {**hf.BLOCK_SPARSE_EXPERTS, **_ROUTING_BIAS}
    return hf.in_model({**hf.GQA_BLOCK, **_NORMS, **experts})
