"""Flavors against published config.json files, and their way there and back."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import transformers

from titan_moe.config.errors import ConfigError
from titan_moe.models.hf import HFModel, differences, family_of
from titan_moe.models.registry import FAMILIES, flavors, model_config

_LITE_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
_LLAMA4: dict[str, Any] = {
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "model_type": "llama4_text",
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "router_jitter_noise": 0.0,
    "vocab_size": 202048,
}
# What decides the dimensions in the files that the models are published with.
PUBLISHED: dict[tuple[str, str], dict[str, Any]] = {
    ("mixtral", "8x7B"): {
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    ("llama4", "17bx16e"): {
        "model_type": "llama4",
        "text_config": _LLAMA4
        | {
            "attn_scale": 0.1,
            "attn_temperature_tuning": 4,
            "floor_scale": 8192,
            "interleave_moe_layer_step": 1,
            "max_position_embeddings": 10485760,
            "no_rope_layers": [],
            "num_local_experts": 16,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 1.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "use_qk_norm": True,
        },
        "vision_config": {"model_type": "llama4_vision_model"},
    },
    ("llama4", "17bx128e"): {
        "model_type": "llama4",
        "text_config": _LLAMA4
        | {
            "interleave_moe_layer_step": 2,
            "max_position_embeddings": 1048576,
            "num_local_experts": 128,
            "rope_scaling": None,
            "use_qk_norm": False,
        },
        "vision_config": {"model_type": "llama4_vision_model"},
    },
    ("gpt_oss", "20b"): _GPT_OSS
    | {
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    ("gpt_oss", "120b"): _GPT_OSS
    | {
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    ("deepseek_v3", "16B"): {
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": _LITE_YARN,
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    ("deepseek_v3", "Moonlight-16B-A3B"): {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "kv_lora_rank": 512,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    ("qwen3", "14B"): {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "max_position_embeddings": 40960,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}
_ALL = [(name, flavor) for name in FAMILIES for flavor in flavors(name)]


@pytest.mark.parametrize("name, flavor", PUBLISHED)
def test_a_flavor_has_the_dimensions_of_the_published_file(name: str, flavor: str):
    settings = PUBLISHED[name, flavor]
    assert family_of(settings, Path("config.json")) == name
    published = import_module(f"titan_moe.models.{name}.hf").from_hf(settings)
    ours = model_config(name, flavor)
    assert differences(ours, published) == []
    assert ours.max_seq_len == published.max_seq_len


@pytest.mark.parametrize("name, flavor", _ALL)
def test_a_flavor_goes_out_as_config_json_and_comes_back(name: str, flavor: str):
    model = HFModel(name, model_config(name, flavor))
    settings = model.settings()  # Raises where something would be lost.
    config = transformers.AutoConfig.for_model(**settings)
    assert config.to_dict()["model_type"] == settings["model_type"]


@pytest.mark.parametrize(
    "name, flavor, change, expected",
    [
        ("mixtral", "8x7B", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("mixtral", "8x7B", {"num_local_experts": None}, "num_local_experts is missing"),
        ("gpt_oss", "20b", {"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported"),
        (
            "gpt_oss",
            "20b",
            {"layer_types": ["full_attention"] * 23 + ["sliding_attention"]},
            "layer_types must repeat",
        ),
        ("gpt_oss", "20b", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ("gpt_oss", "20b", {"rope_scaling": None}, "rope_scaling is missing"),
    ],
)
def test_what_is_not_supported_is_named(
    name: str, flavor: str, change: dict[str, Any], expected: str
):
    module = import_module(f"titan_moe.models.{name}.hf")
    with pytest.raises(ConfigError) as refused:
        module.from_hf(PUBLISHED[name, flavor] | change)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"moe_layers": [0, 3]}, "moe_layers must repeat"),
        ({"no_rope_layers": [1, 0, 0, 1] * 12}, "no_rope_layers must repeat"),
    ],
)
def test_llama4_layers_must_repeat(change: dict[str, Any], expected: str):
    module = import_module("titan_moe.models.llama4.hf")
    with pytest.raises(ConfigError) as refused:
        module.from_hf(_LLAMA4 | {"num_local_experts": 16} | change)
    assert expected in str(refused.value)
