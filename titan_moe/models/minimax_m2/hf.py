"""MiniMax-M2, from the config.json file of MiniMaxAI/MiniMax-M2. Its queries are normed over all
heads together, and so are its keys; positions rotate half of each head's channels.

That file names multi-token prediction layers, whose weights are not published: there are none here.
"""

from titan_moe.models import hf_family as hf
from titan_moe.models import hf_names as names
from titan_moe.models.config import ModelConfig

MODEL_TYPES = ("minimax_m2",)

_FORM = hf.Form(
    family="minimax_m2",
    architecture="MiniMaxM2",
    keys=hf.BLOCK_SPARSE_KEYS,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196_608},
    fixed={
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
        "router_jitter_noise": 0.0,
    },
    fields={
        "attention.qk_norm": "across_heads",
        "moe.score": "sigmoid",
        "moe.normalize_top_k": True,
    },
    rope={"theta": 5e6, "partial": True},
)


def from_hf(settings: hf.Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    kinds = sorted(set(hf.given(settings, "attn_type_list", [1])))
    hf.only({**settings, "attn_type_list": kinds}, attn_type_list=([1],))
    hf.only(settings, attention_bias=(False,), sliding_window=(None,))
    fields = _FORM.read(settings)
    head_dim = fields["attention.head_dim"]
    rotated = hf.given(settings, "rotary_dim", head_dim) / head_dim
    fields["attention.partial_rotary_factor"] = hf.rotary_factor(settings, head_dim, rotated)
    return _FORM.config(fields)


def to_hf(config: ModelConfig) -> hf.Settings:
    """A config.json of these dimensions."""
    return _FORM.write(config, rotary_dim=_FORM.attention_of(config).rope_dim)


_NORMS = names.renamed("attention.*_norm.weight", "self_attn.*_norm.weight", {"wq": "q", "wk": "k"})
# The published form, then that of transformers 5 in memory.
_ROUTING_BIAS: names.HFKeys = {
    "moe.router.expert_bias": (
        names.HFWeight("block_sparse_moe.e_score_correction_bias"),
        names.HFWeight("mlp.e_score_correction_bias"),
    )
}


def keys(config: ModelConfig) -> names.HFKeys:
    """Names of each tensor."""
    experts = {**names.BLOCK_SPARSE_EXPERTS, **_ROUTING_BIAS}
    return names.in_model({**names.GQA_BLOCK, **_NORMS, **experts})
