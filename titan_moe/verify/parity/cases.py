"""Which models are compared with those of `transformers`: families x options, as config.json."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class ParityCase:
    """A tiny config.json of one family with one option set."""

    family: str
    option: str
    settings: dict[str, Any]
    """Of transformers 5, which writes `rope_parameters`."""
    expert_scale: float = 1.0
    """A factor on the experts' first matrices, to reach the limits of their activation."""
    zero_gradients: tuple[str, ...] = ()
    """Weights of ours whose gradient is nothing but rounding: its exact value is zero."""

    def __str__(self) -> str:
        return f"{self.family}: {self.option}"


_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# The borders of the blended channels lie inside a head of 8 channels, between two of them.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

_QWEN3 = _SIZES | {"model_type": "qwen3", "head_dim": 8, "rope_parameters": _PLAIN_ROPE}
_QWEN3_MOE = _QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
_MIXTRAL = _SIZES | {
    "model_type": "mixtral",
    "head_dim": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 16,
    "rope_parameters": _PLAIN_ROPE,
}
_DEEPSEEK_V3 = _SIZES | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "rope_parameters": _PLAIN_ROPE,
}
_DEEPSEEK_V2 = {
    key: value
    for key, value in _DEEPSEEK_V3.items()
    if key not in ("num_nextn_predict_layers", "norm_topk_prob")
} | {
    "model_type": "deepseek_v2",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
_LLAMA4 = _SIZES | {
    "model_type": "llama4_text",
    "head_dim": 8,
    "num_hidden_layers": 3,
    "intermediate_size": 16,
    "intermediate_size_mlp": 48,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 16,
    "floor_scale": 8,
    "rope_parameters": _PLAIN_ROPE,
}
_GPT_OSS = _SIZES | {
    "model_type": "gpt_oss",
    "head_dim": 8,
    "intermediate_size": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 10,
    "rope_parameters": _YARN | {"truncate": False},
}

_BASES: dict[str, dict[str, Any]] = {
    "qwen3 (dense)": _QWEN3,
    "qwen3": _QWEN3_MOE,
    "mixtral": _MIXTRAL,
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3,
    "llama4": _LLAMA4,
    "gpt_oss": _GPT_OSS,
}
# Family -> option -> what differs from the base; "plain" is the base itself.
_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3 (dense)": {
        "plain": {},
        "tied embeddings": {"tie_word_embeddings": True},
        "attention biases": {"attention_bias": True},
        "YaRN, beyond its original length": {"rope_parameters": _YARN},
    },
    "qwen3": {
        "plain": {},
        "top-k not normalised": {"norm_topk_prob": False},
        "3 experts, top 1, not normalised": {
            "num_experts": 3,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
        },
        "5 experts, top 3": {"num_experts": 5, "num_experts_per_tok": 3},
        "first layer dense": {"mlp_only_layers": [0]},
        "experts in every second layer": {"num_hidden_layers": 4, "decoder_sparse_step": 2},
        "attention biases": {"attention_bias": True},
        "tied embeddings": {"tie_word_embeddings": True},
    },
    "mixtral": {
        "plain": {},
        "3 experts": {"num_local_experts": 3},
        "5 experts, top 3": {"num_local_experts": 5, "num_experts_per_tok": 3},
        "sliding window": {"sliding_window": 10},
        "tied embeddings": {"tie_word_embeddings": True},
        "YaRN, beyond its original length": {"rope_parameters": _YARN},
    },
    "deepseek_v2": {
        "plain": {},
        # As many experts as groups would never be limited by the groups of their best.
        "groups": {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
        },
        "direct queries": {"q_lora_rank": None},
        "2 shared experts": {"n_shared_experts": 2},
        "5 experts, scaled": {"n_routed_experts": 5, "routed_scaling_factor": 16.0},
        "attention biases": {"attention_bias": True},
        "YaRN, beyond its original length": {
            "rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
        },
    },
    "deepseek_v3": {
        "plain": {},
        "no groups": {"n_group": 1, "topk_group": 1},
        "direct queries": {"q_lora_rank": None},
        "2 shared experts": {"n_shared_experts": 2},
        "top-k not normalised": {"norm_topk_prob": False},
        "5 experts, top 3": {
            "n_routed_experts": 5,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
        },
        "attention biases": {"attention_bias": True},
        "tied embeddings": {"tie_word_embeddings": True},
        "YaRN, beyond its original length": {
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.707}
        },
        "multi-token prediction": {"num_nextn_predict_layers": 1},
        "multi-token prediction, 2 deep": {"num_nextn_predict_layers": 2},
    },
    "llama4": {
        "plain": {},
        "experts in every second layer": {"interleave_moe_layer_step": 2},
        "no QK norm": {"use_qk_norm": False},
        "no temperature": {"attn_temperature_tuning": False},
        "all layers rotate": {"no_rope_layers": [1, 1, 1]},
        "chunk longer than the row": {"attention_chunk_size": 64},
        "Llama 3 scaling, beyond its original length": {"rope_parameters": _LLAMA3},
        "Llama 3 scaling, no blended band": {
            "rope_parameters": _LLAMA3 | {"high_freq_factor": 1.0}
        },
        "5 experts, top 2": {"num_local_experts": 5, "num_experts_per_tok": 2},
        "attention biases": {"attention_bias": True},
        "tied embeddings": {"tie_word_embeddings": True},
    },
    "gpt_oss": {
        "plain": {},
        "no YaRN": {"rope_parameters": _PLAIN_ROPE},
        "YaRN truncated": {"rope_parameters": _YARN | {"truncate": True}},
        "no attention biases": {"attention_bias": False},
        "window longer than the row": {"sliding_window": 64},
        "3 experts": {"num_local_experts": 3},
        "5 experts, top 4": {"num_local_experts": 5, "num_experts_per_tok": 4},
        "clamps reached": {},
        "tied embeddings": {"tie_word_embeddings": True},
    },
}
_MORE: dict[tuple[str, str], dict[str, Any]] = {
    ("gpt_oss", "clamps reached"): {"expert_scale": 8.0},
    # Without positions a bias of all keys moves each query's scores alike.
    ("llama4", "attention biases"): {"zero_gradients": ("layers.2.attention.wk.bias",)},
}


def cases() -> Iterator[ParityCase]:
    """All of them, a family's plain one first."""
    for family, options in _OPTIONS.items():
        for option, changes in options.items():
            more = _MORE.get((family, option), {})
            yield ParityCase(family, option, _BASES[family] | changes, **more)
