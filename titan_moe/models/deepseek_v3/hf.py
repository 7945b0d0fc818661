"""DeepSeek in Hugging Face folders: V2 (softmax scores), V3 (sigmoid scores and their bias).

Kimi-K2 (`kimi_k2`) is a V3 by another name, and goes out as one. What transformers' own code of a
version leaves out, whatever config.json says, is refused rather than trained differently.
"""

from typing import Any

from titan_moe.models.config import MLAConfig, ModelConfig
from titan_moe.models.hf_family import (
    BLOCK_NORMS,
    EMBEDDINGS,
    EXPERTS,
    FEED_FORWARD,
    HFCopies,
    HFKeys,
    HFWeight,
    Settings,
    attention_of,
    given,
    in_layers,
    needed,
    only,
    rope_from_hf,
    rope_to_hf,
)
from titan_moe.moe.config import MoEConfig

_FAMILY = "deepseek_v3"
_IS_V3 = {"sigmoid": True, "softmax": False}
MODEL_TYPES = ("deepseek_v3", "deepseek_v2", "kimi_k2")
IGNORED = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
COPIES: HFCopies = {
    "model.layers.{layer}.embed_tokens.weight": "tok_embeddings.weight",
    "model.layers.{layer}.shared_head.head.weight": "output.weight",
}


def from_hf(settings: Settings) -> ModelConfig:
    """The dimensions of a config.json. Raises ConfigError for what is not supported."""
    only(settings, hidden_act=("silu",), mlp_bias=(False,), moe_layer_freq=(1,))
    only(settings, rope_interleave=(True,))
    heads = needed(settings, "num_attention_heads")
    only(settings, num_key_value_heads=(heads,))
    with_experts = bool(settings.get("n_routed_experts"))
    mtp = given(settings, "num_nextn_predict_layers", given(settings, "num_mtp_layers", 0))
    return ModelConfig(
        vocab_size=needed(settings, "vocab_size"),
        dim=needed(settings, "hidden_size"),
        num_layers=needed(settings, "num_hidden_layers"),
        hidden_dim=needed(settings, "intermediate_size"),
        attention=MLAConfig(
            num_heads=heads,
            q_rank=settings.get("q_lora_rank"),
            kv_rank=needed(settings, "kv_lora_rank"),
            nope_dim=needed(settings, "qk_nope_head_dim"),
            rope_dim=needed(settings, "qk_rope_head_dim"),
            v_dim=needed(settings, "v_head_dim"),
            bias=given(settings, "attention_bias", False),
        ),
        rope=rope_from_hf(settings, "neighbours", latent=True),
        moe=_experts(settings) if with_experts else None,
        num_dense_layers=given(settings, "first_k_dense_replace", 0) if with_experts else 0,
        tied_embeddings=given(settings, "tie_word_embeddings", False),
        num_mtp_layers=mtp,
        max_seq_len=given(settings, "max_position_embeddings", 4096),
        norm_eps=given(settings, "rms_norm_eps", 1e-6),
        init_std=given(settings, "initializer_range", 0.02),
    )


def _experts(settings: Settings) -> MoEConfig:
    sigmoid = settings.get("model_type") != "deepseek_v2"
    groups = given(settings, "n_group", 1)
    if sigmoid:
        only(settings, scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    else:
        only(settings, scoring_func=("softmax",), norm_topk_prob=(False,))
        method = given(settings, "topk_method", "greedy")
        only(settings, topk_method=("greedy", "group_limited_greedy"))
        groups = 1 if method == "greedy" else groups
    return MoEConfig(
        num_experts=needed(settings, "n_routed_experts"),
        top_k=needed(settings, "num_experts_per_tok"),
        hidden_dim=needed(settings, "moe_intermediate_size"),
        num_shared_experts=given(settings, "n_shared_experts", 0),
        score="sigmoid" if sigmoid else "softmax",
        normalize_top_k=sigmoid and given(settings, "norm_topk_prob", True),
        route_scale=float(given(settings, "routed_scaling_factor", 2.5 if sigmoid else 1.0)),
        num_groups=groups,
        top_groups=given(settings, "topk_group", 1) if groups > 1 else 1,
        group_score_top=2 if sigmoid and groups > 1 else 1,
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A config.json of these dimensions."""
    attention, moe = attention_of(config, MLAConfig, _FAMILY), config.moe
    sigmoid = moe is None or _IS_V3[moe.score]
    settings: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM" if sigmoid else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads,
        "q_lora_rank": attention.q_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.v_dim,
        "attention_bias": attention.bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
        "num_nextn_predict_layers": config.num_mtp_layers,
        **rope_to_hf(config.rope),
    }
    return settings | (_experts_to_hf(config, moe) if moe else _no_experts(config))


def _experts_to_hf(config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    sigmoid = _IS_V3[moe.score]
    by_groups = "noaux_tc" if sigmoid else "group_limited_greedy"
    return {
        "first_k_dense_replace": config.num_dense_layers,
        "moe_layer_freq": config.moe_every,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.num_shared_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.hidden_dim,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "topk_method": by_groups if sigmoid or moe.num_groups > 1 else "greedy",
        "scoring_func": moe.score,
        "norm_topk_prob": moe.normalize_top_k,
        "routed_scaling_factor": moe.route_scale,
    }


def _no_experts(config: ModelConfig) -> dict[str, Any]:
    # transformers knows dense layers only as the first ones.
    return {"first_k_dense_replace": config.num_layers, "n_routed_experts": 0}


_DIRECT_QUERY = {"wq.weight": "q_proj.weight"}
_LATENT_QUERY = {
    "wq_a.weight": "q_a_proj.weight",
    "q_norm.weight": "q_a_layernorm.weight",
    "wq_b.weight": "q_b_proj.weight",
}
_KEYS_AND_VALUES = {
    "wkv_a.weight": "kv_a_proj_with_mqa.weight",
    "kv_norm.weight": "kv_a_layernorm.weight",
    "wkv_b.weight": "kv_b_proj.weight",
    "wo.weight": "o_proj.weight",
}
_BIASES = {
    "wq_a.bias": "q_a_proj.bias",
    "wkv_a.bias": "kv_a_proj_with_mqa.bias",
    "wo.bias": "o_proj.bias",
}
_SHARED_EXPERTS = {
    "w1.weight": "gate_proj.weight",
    "w2.weight": "down_proj.weight",
    "w3.weight": "up_proj.weight",
}
_MTP = {
    "embedding_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "projection.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}


def keys(config: ModelConfig) -> HFKeys:
    """Where each tensor is. The routing's bias has a place beside sigmoid scores only (V3)."""
    attention = attention_of(config, MLAConfig, _FAMILY)
    names = _KEYS_AND_VALUES | (_DIRECT_QUERY if attention.q_rank is None else _LATENT_QUERY)
    if attention.bias:
        names |= _BIASES
    block: dict[str, tuple[HFWeight, ...]] = {**BLOCK_NORMS, **FEED_FORWARD, **EXPERTS}
    block |= _under("attention.", "self_attn.", names)
    block |= _under("moe.shared_experts.", "mlp.shared_experts.", _SHARED_EXPERTS)
    if config.moe is not None and _IS_V3[config.moe.score]:
        block["moe.router.expert_bias"] = (HFWeight("mlp.gate.e_score_correction_bias"),)
    found = {**EMBEDDINGS, **in_layers(block)}
    if config.num_mtp_layers:
        found |= in_layers(block, ours="mtp.layers.{layer}.block.")
        found |= in_layers(_under("", "", _MTP), ours="mtp.layers.{layer}.")
    return found


def _under(ours: str, theirs: str, names: dict[str, str]) -> dict[str, tuple[HFWeight, ...]]:
    return {ours + name: (HFWeight(theirs + other),) for name, other in names.items()}
