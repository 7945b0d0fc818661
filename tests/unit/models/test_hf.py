"""config.json of every flavor and of published models; dimensions as a record."""

import json
from dataclasses import replace

import pytest

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Model
from titan_moe.models.config import Llama3Scaling, RopeConfig, YarnScaling
from titan_moe.models.hf import (
    HFModel,
    as_record,
    differences,
    export_problems,
    from_record,
    model_of,
    model_of_job,
)
from titan_moe.models.registry import FAMILIES, flavors, model_config

EVERY = [(family, flavor) for family in FAMILIES for flavor in flavors(family)]

# The config.json files of Qwen/Qwen3-30B-A3B, Qwen/Qwen3-0.6B, deepseek-ai/DeepSeek-V3 and
# deepseek-ai/DeepSeek-V2-Lite on the Hugging Face Hub, without what no dimension follows from.
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_DENSE = {
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
DEEPSEEK_V3 = {
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": None,
    "q_lora_rank": None,
    "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
PUBLISHED = [
    ("qwen3", "30B-A3B", QWEN3_MOE),
    ("qwen3", "0.6B", QWEN3_DENSE),
    ("deepseek_v3", "671B", DEEPSEEK_V3),
    ("deepseek_v3", "16B", DEEPSEEK_V2_LITE),
]


def _write(folder, settings):
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(("family", "flavor", "settings"), PUBLISHED)
def test_published_files_are_the_flavors(family, flavor, settings, tmp_path):
    found = model_of(_write(tmp_path, settings))
    assert found.family == family
    assert differences(found.config, model_config(family, flavor)) == []


@pytest.mark.parametrize(("family", "flavor"), EVERY)
def test_a_flavor_survives_its_config_json(family, flavor, tmp_path):
    config = model_config(family, flavor)
    settings = HFModel(family, config).settings()
    found = model_of(_write(tmp_path, settings))
    assert found.family == family and differences(config, found.config) == []
    assert found.config.max_seq_len == config.max_seq_len


@pytest.mark.parametrize(("family", "flavor"), EVERY)
def test_transformers_reads_it_and_what_it_writes_is_read(family, flavor, tmp_path):
    import transformers

    config = model_config(family, flavor)
    _write(tmp_path, HFModel(family, config).settings())
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    assert differences(config, model_of(tmp_path).config) == []


@pytest.mark.parametrize(("family", "flavor"), EVERY)
def test_a_record_is_the_config(family, flavor):
    config = model_config(family, flavor)
    assert from_record(json.loads(json.dumps(as_record(config)))) == config


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        YarnScaling(4.0, 128),
        YarnScaling(4.0, 128, 32.0, 1.0, 0.7, 0.0, truncate=False),
        Llama3Scaling(8.0, 128),
        Llama3Scaling(8.0, 128, 2.0, 5.0),
    ],
)
def test_a_record_knows_the_scalings_apart(scaling):
    rope = RopeConfig(10_000.0, "halves", scaling)
    config = replace(model_config("qwen3", "gate"), rope=rope)
    found = from_record(json.loads(json.dumps(as_record(config))))
    assert found == config and type(found.rope.scaling) is type(scaling)


def test_a_broken_record_is_one_line():
    record = as_record(model_config("qwen3", "gate")) | {"dim": "many"}
    with pytest.raises(ConfigError) as raised:
        from_record(record)
    assert len(raised.value.lines) == 1 and "dim" in raised.value.lines[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (QWEN3_MOE | {"model_type": "gpt2"}, "model_type='gpt2' is not supported: only"),
        (QWEN3_MOE | {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        (QWEN3_MOE | {"use_sliding_window": True}, "use_sliding_window=True"),
        (QWEN3_MOE | {"mlp_only_layers": [3]}, "mlp_only_layers=[3]"),
        (QWEN3_MOE | {"hidden_size": None}, "hidden_size is missing"),
        (QWEN3_MOE | {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type='linear'"),
        (DEEPSEEK_V3 | {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (DEEPSEEK_V2_LITE | {"norm_topk_prob": True}, "norm_topk_prob=True"),
        (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        (["no", "object"], "holds no JSON object"),
        (QWEN3_MOE | {"mlp_only_layers": 7}, "makes no sense"),
    ],
)
def test_what_is_not_supported_is_named(settings, words, tmp_path):
    with pytest.raises(ConfigError) as raised:
        model_of(_write(tmp_path, settings))
    (line,) = raised.value.lines
    assert words in line and str(tmp_path) in line


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        model_of(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        model_of(tmp_path / "none")


def test_yarn_of_other_attention_scales_cosines_alone(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    found = model_of(_write(tmp_path, QWEN3_DENSE | {"rope_scaling": yarn})).config.rope
    assert found.scaling == YarnScaling(4.0, 32768, mscale=1.0, mscale_all_dim=0.0)


def test_differences_name_both_values():
    config = model_config("qwen3", "gate")
    assert config.moe is not None
    other = replace(config, dim=64, init_std=1.0, moe=replace(config.moe, top_k=3, z_loss_weight=1))
    assert differences(config, other) == ["dim 32 (there 64)", "moe.top_k 2 (there 3)"]


def test_what_a_family_cannot_say_is_refused():
    config = model_config("qwen3", "gate")
    assert config.moe is not None
    shared = replace(config, moe=replace(config.moe, num_shared_experts=1))
    with pytest.raises(ConfigError, match=r"no place for moe\.num_shared_experts 1"):
        HFModel("qwen3", shared).settings()


def test_a_routing_bias_without_a_place_is_refused_before_training():
    model = HFModel("deepseek_v3", model_config("deepseek_v3", "debugmodel"))
    (line,) = export_problems(model, None)
    assert "moe.bias_update_speed=0.001" in line and "softmax" in line
    assert export_problems(model, 0.0) == []
    assert export_problems(HFModel("deepseek_v3", model_config("deepseek_v3", "2M")), 0.1) == []


def test_multi_token_prediction_without_a_place_is_refused_before_training():
    section = Model(name="mixtral", flavor="gate", num_mtp_layers=1)
    (line,) = export_problems(HFModel("mixtral", model_of_job(section)), 0.0)
    assert "mixtral has no place for model.num_mtp_layers=1: choose 0" in line
    without = section.model_copy(update={"num_mtp_layers": 0})
    assert export_problems(HFModel("mixtral", model_of_job(without)), 0.0) == []


def test_flavor_hf_takes_the_folders_dimensions(tmp_path):
    _write(tmp_path, QWEN3_DENSE)
    section = Model(name="qwen3", flavor="hf", hf_assets_path=str(tmp_path))
    assert section.tokenizer_path == str(tmp_path)
    assert differences(model_of_job(section), model_config("qwen3", "0.6B")) == []
    with pytest.raises(ConfigError, match="family 'qwen3': set that"):
        model_of_job(section.model_copy(update={"name": "deepseek_v3"}))
    with pytest.raises(ConfigError, match=r"needs model\.hf_assets_path"):
        model_of_job(Model(name="qwen3", flavor="hf"))
    assert Model(hf_assets_path="x", tokenizer_path="bytes").tokenizer_path == "bytes"
