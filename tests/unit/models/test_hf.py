"""config.json of every flavor, there and back; what is refused; dimensions as a record."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.refusals import refusal
from titan_moe.checkpoint.hf.folder import HFFolder
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Model
from titan_moe.models import registry
from titan_moe.models.deepseek_v32 import hf as deepseek_v32
from titan_moe.models.hf import (
    HFModel,
    as_record,
    differences,
    export_problems,
    from_record,
    model_of,
    model_of_job,
    read_settings,
)
from titan_moe.models.kimi_linear import hf as kimi_linear
from titan_moe.models.registry import FAMILIES, flavors, model_config
from titan_moe.prepare.job import check_all
from titan_moe.verify.parity.check import cases

EVERY = [(family, flavor) for family in FAMILIES for flavor in flavors(family)]


def settings_of(family: str, flavor: str) -> dict[str, Any]:
    folder = Path(registry.__file__).parent / family / "flavors"
    return json.loads((folder / f"{flavor}.json").read_text())


def write(folder: Path, settings: object) -> Path:
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(("family", "flavor"), EVERY)
def test_flavor_survives_config_json_also_of_transformers_and_a_record(family, flavor, tmp_path):
    config = model_config(family, flavor)
    for settings in (settings_of(family, flavor), HFModel(family, config).settings()):
        found = model_of(write(tmp_path, settings))
        assert found.family == family and differences(config, found.config) == []
        assert found.config.max_seq_len == config.max_seq_len
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.to_dict()["model_type"] == settings["model_type"]
    theirs.save_pretrained(tmp_path)
    assert differences(config, model_of(tmp_path).config) == []
    assert from_record(json.loads(json.dumps(as_record(config)))) == config


_PLAIN = {
    case.family: case.settings
    for case in cases()
    if case.option == "plain" and case.family != "step3p7"  # It has no class of its own.
}


@pytest.mark.parametrize("tied", [True, False, None])
@pytest.mark.parametrize("family", _PLAIN)
def test_embeddings_that_transformers_ties_are_tied_and_others_refused(family, tied, tmp_path):
    given = {key: value for key, value in _PLAIN[family].items() if key != "tie_word_embeddings"}
    given |= {} if tied is None else {"tie_word_embeddings": tied}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(json.dumps(given))))
    ties = theirs.lm_head.weight is theirs.get_input_embeddings().weight
    folder = write(tmp_path, theirs.config.to_dict())
    if tied and not ties:
        with pytest.raises(ConfigError, match="tie_word_embeddings=True is not supported"):
            model_of(folder)
        return
    assert model_of(folder).config.tied_embeddings == ties


_UNSEEN = {"rope_parameters", "sliding_window", "n_group", "topk_group", "norm_topk_prob"}
_KINDS = {"mixtral": "Mixtral", "llama4_text": "Llama4", "minimax_m2": "MiniMaxM2"}
_KINDS |= {"gpt_oss": "GptOss", "deepseek_v3": "DeepseekV3", "deepseek_v32": "DeepseekV32"}


@pytest.mark.parametrize("kind", _KINDS)
def test_defaults_of_keys_that_no_shape_shows_are_transformers(kind, tmp_path):
    whole = transformers.AutoConfig.for_model(kind).to_dict()
    whole["architectures"] = [f"{_KINDS[kind]}ForCausalLM"]
    expected = model_of(write(tmp_path, whole)).config
    for key in whole.keys() & _UNSEEN - ({"rope_parameters"} if kind == "gpt_oss" else set()):
        found = model_of(write(tmp_path, {k: v for k, v in whole.items() if k != key})).config
        assert differences(expected, found) == [], key


V3, V2, QWEN3 = ("deepseek_v3", "671B"), ("deepseek_v3", "16B"), ("qwen3", "30B-A3B")
OSS, SCOUT, MIXTRAL = ("gpt_oss", "20b"), ("llama4", "gate"), ("mixtral", "8x7B")
NEXT = ("qwen3_next", "gate")
GLM, MINIMAX = ("glm4_moe", "GLM-4.5"), ("minimax_m2", "MiniMax-M2")
KIMI = ("kimi_linear", "48B-A3B")
_STATES = {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}
SPARSE, GLM5 = ("deepseek_v32", "671B"), ("deepseek_v32", "GLM-5")
GEMMA, STEP = ("gemma4", "26B-A4B"), ("step3p7", "Step-3.7-Flash")
MIMO = ("mimo_v2", "V2-Flash")
NEMO = ("nemotron_h", "120B-A12B")


@pytest.mark.parametrize(
    ("flavor", "change", "words"),
    [
        (QWEN3, {"model_type": "gpt2"}, "model_type='gpt2' is not supported: only"),
        (QWEN3, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: only 'silu'"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window=True"),
        (QWEN3, {"mlp_only_layers": [3]}, "mlp_only_layers=[3]"),
        (QWEN3, {"mlp_only_layers": 7}, "makes no sense"),
        (QWEN3, {"hidden_size": None}, "hidden_size is missing"),
        (QWEN3, {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type='linear'"),
        (QWEN3, {"hidden_size": "32"}, "hidden_size='32' must be a whole number, 1 or more"),
        (QWEN3, {"hidden_size": [1]}, "hidden_size=[1] must be a whole number, 1 or more"),
        (QWEN3, {"num_attention_heads": 0}, "num_attention_heads=0 must be a whole number, 1 or"),
        (V3, {"hidden_size": -32}, "hidden_size=-32 must be a whole number, 1 or more"),
        (V3, {"num_hidden_layers": 10**30}, "must be a whole number, 1 or more"),
        (V3, {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a number, 0 or more"),
        (V3, {"first_k_dense_replace": 1.5}, "first_k_dense_replace=1.5 must be a whole number"),
        (V3, {"attention_bias": "false"}, "attention_bias='false' must be true or false"),
        (V3, {"rope_theta": float("inf")}, "makes no sense: attention.rope.theta=inf must be"),
        (NEXT, {"linear_conv_kernel_dim": -4}, "linear_conv_kernel_dim=-4 must be a whole number"),
        (OSS, {"sliding_window": -128}, "makes no sense: near.local.size=-128 must be 0 or"),
        (QWEN3, {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "by kind of layer"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob=True"),
        (V3, {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        (MIXTRAL, {"num_local_experts": None}, "num_local_experts is missing"),
        (OSS, {"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported"),
        (OSS, {"rope_scaling": None}, "rope_scaling is missing"),
        (GLM, {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        (GLM, {"partial_rotary_factor": 0.3, "head_dim": 90}, "rotates 27 of 90 channels"),
        (GLM, {"n_routed_experts": None}, "n_routed_experts is missing"),
        (MINIMAX, {"attn_type_list": [0, 1]}, "attn_type_list=[0, 1] is not supported: only [1]"),
        (MINIMAX, {"qk_norm_type": "per_head"}, "only 'per_layer'"),
        (MINIMAX, {"sliding_window": 4096}, "sliding_window=4096 is not supported: only None"),
        (SCOUT, {"moe_layers": [0, 3]}, "moe_layers must repeat"),
        (SCOUT, {"no_rope_layers": [1, 0, 0, 1]}, "no_rope_layers must have 8 entries, not 4"),
        (NEXT, {"layer_types": ["sliding_attention"] * 8}, "only linear_attention or full_att"),
        (NEXT, {"mlp_only_layers": [0]}, "mlp_only_layers=[0] is not supported"),
        (NEXT, {"shared_expert_intermediate_size": 40}, "must be a multiple of moe_intermediate"),
        (NEXT, {"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim is missing"),
        (SPARSE, {"indexer_rope_interleave": True}, "indexer_rope_interleave=True is not supp"),
        (GLM5, {"indexer_rope_interleave": False}, "indexer_rope_interleave=False is not supp"),
        (SPARSE, {"index_topk": None}, "index_topk is missing"),
        (SPARSE, {"q_lora_rank": None}, "q_lora_rank is missing"),
        (GLM5, {"indexer_types": ["full", "shared"]}, "must be full or shared for each of 78"),
        (GLM5, {"indexer_types": ["shared", *["full"] * 77]}, "and full for the first"),
        (GLM5, {"indexer_types": ["full"] * 77 + ["none"]}, "must be full or shared"),
        (GLM5, {"index_topk_freq": 4, "index_skip_topk_offset": 0}, "and full for the first"),
        (SPARSE, {"index_topk_freq": 4}, "index_topk_freq=4 is not supported: only 1"),
        (GLM5, {"index_topk_pattern": "FSSF"}, "index_topk_pattern='FSSF' is not supported"),
        (GLM5, {"mlp_layer_types": ["sparse", "dense"]}, "only dense layers first"),
        (KIMI, {"linear_attn_config": {**_STATES}}, "full_attn_layers is missing"),
        (KIMI, {"linear_attn_config": None}, "linear_attn_config is missing"),
        (KIMI, {"mla_use_nope": False}, "mla_use_nope=False is not supported"),
        (KIMI, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1 is not supported"),
        (SPARSE, {"layer_types": ["full_attention"]}, "only indexed_attention is supported"),
        (GEMMA, {"enable_moe_block": False}, "enable_moe_block=False is not supported: only True"),
        (GEMMA, {"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input is missing"),
        (GEMMA, {"hidden_activation": "silu"}, "hidden_activation='silu' is not supported"),
        (GEMMA, {"use_bidirectional_attention": "all"}, "only 'vision'"),
        (GEMMA, {"layer_types": ["sliding_attention"] * 30}, "the last of 30 must be full"),
        (GEMMA, {"per_layer_config": {"4": {"head_dim": 8}}}, "per_layer_config must be the same"),
        (GEMMA, {"final_logit_softcapping": "30"}, "final_logit_softcapping='30' must be a number"),
        (STEP, {"swiglu_limits": [7.0, 8.0]}, "swiglu_limits may have one limit beside none"),
        (STEP, {"moe_layers_enum": "1,3", "mlp_layer_types": None}, "only dense layers first"),
        (STEP, {"sliding_window": None}, "sliding_window is missing"),
        (STEP, {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        (STEP, {"first_k_dense_replace": 2}, "first_k_dense_replace=2 is not supported: only 3"),
        (MIMO, {"swa_num_key_value_heads": 4}, "swa_num_key_value_heads=4 is not supported"),
        (MIMO, {"hybrid_layer_pattern": [1] * 48}, "is not supported: only [0, 1, 1, 1, 1, 0"),
        (MIMO, {"rope_theta": 1e6}, "rope_theta=1000000.0 is not supported: only 5000000.0"),
        (MIMO, {"layernorm_epsilon": 1e-6}, "layernorm_epsilon=1e-06 is not supported"),
        (MIMO, {"moe_layer_freq": [1] * 48}, "moe_layer_freq="),
        (NEMO, {"num_hidden_layers": 3}, "num_hidden_layers=3 is not supported: only 88"),
        (NEMO, {"hybrid_override_pattern": None}, "hybrid_override_pattern is missing"),
        (NEMO, {"hybrid_override_pattern": "MEW"}, "of the kinds ['W'] are not supported"),
        (NEMO, {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2 is not supported"),
        (NEMO, {"mtp_hybrid_override_pattern": "*"}, "pattern='*' is not supported: only '*E'"),
        (NEMO, {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' is not supported: only 'relu2'"),
        (NEMO, {"mlp_bias": True}, "mlp_bias=True is not supported"),
        (NEMO, {"sliding_window": 64}, "sliding_window=64 is not supported"),
        (NEMO, {"moe_shared_expert_intermediate_size": 99}, "must be a multiple of moe_interm"),
    ],
)
def test_error_names_unsupported_settings_of_config_json(flavor, change, words, tmp_path):
    line = refusal(model_of, write(tmp_path, settings_of(*flavor) | change))
    assert words in line and str(tmp_path) in line


@pytest.mark.parametrize(
    ("flavor", "change_of"),
    [
        (OSS, lambda kinds: {"layer_types": [each or "sliding_attention" for each in kinds]}),
        (NEXT, lambda kinds: {"layer_types": [each or "linear_attention" for each in kinds]}),
        (SCOUT, lambda kinds: {"no_rope_layers": [int(not each) for each in kinds]}),
        (
            KIMI,
            lambda kinds: {
                "linear_attn_config": _STATES
                | {"full_attn_layers": [n for n, each in enumerate(kinds, 1) if each]}
            },
        ),
    ],
)
def test_layers_of_each_kind_are_read_in_any_order(flavor, change_of, tmp_path):
    num_layers = model_config(*flavor).num_layers
    kinds = ["full_attention", *[""] * (num_layers - 2), "full_attention"]
    model = model_of(write(tmp_path, settings_of(*flavor) | change_of(kinds)))
    config = model.config
    assert [config.mixer(n) is config.attention for n in range(num_layers)] == [*map(bool, kinds)]
    assert differences(config, model_of(write(tmp_path, model.settings())).config) == []


def test_step_of_windows_alone_is_written_as_it_is_read(tmp_path):
    settings = settings_of(*STEP) | {"layer_types": ["sliding_attention"] * 45}
    model = model_of(write(tmp_path, settings))
    written = model.settings()
    assert written["rope_parameters"].keys() == {"sliding_attention"}
    assert differences(model.config, model_of(write(tmp_path, written)).config) == []


def test_folder_without_config_json_is_refused(tmp_path):
    assert "has no config.json" in refusal(model_of, tmp_path)
    assert "does not exist" in refusal(model_of, tmp_path / "none")
    assert "holds no JSON object" in refusal(model_of, write(tmp_path, ["no", "object"]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("text_config", "text"),
        ("quantization_config", [1]),
        ("rope_parameters", 3),
        ("rope_scaling", "yarn"),
        ("model_type", ["qwen3"]),
    ],
)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "text_config"])
def test_a_key_of_another_kind_is_refused_wherever_config_json_is_read(
    inside, key, value, tmp_path
):
    settings = settings_of("qwen3", "0.6B") | {key: value}
    write(tmp_path, {"model_type": "qwen3_vl", "text_config": settings} if inside else settings)
    for read in (model_of, read_settings):
        assert f"config.json: {key}={value!r} must be a" in refusal(read, tmp_path)


def test_differences_name_both_values():
    config = model_config("qwen3", "gate")
    assert config.moe is not None
    other = replace(config, dim=64, init_std=1.0, moe=replace(config.moe, top_k=3, z_loss_weight=1))
    assert differences(config, other) == ["dim 32 (there 64)", "moe.top_k 2 (there 3)"]


def test_dimension_without_a_hugging_face_key_is_refused():
    config = model_config("qwen3", "gate")
    assert config.moe is not None
    shared = replace(config, moe=replace(config.moe, num_shared_experts=1))
    assert "no place for moe.num_shared_experts 1" in refusal(HFModel("qwen3", shared).settings)


def test_export_is_refused_before_training_where_a_tensor_has_no_place():
    model = HFModel("deepseek_v3", model_config("deepseek_v3", "debugmodel"))
    (line,) = export_problems(model, None)
    assert "moe.bias_update_speed=0.001" in line and "softmax" in line
    assert export_problems(model, 0.0) == []
    assert export_problems(HFModel("deepseek_v3", model_config("deepseek_v3", "2M")), 0.1) == []
    for family, depths in (("mixtral", 1), ("qwen3_next", 2)):
        section = Model(name=family, flavor="gate", num_mtp_layers=depths)
        (line,) = export_problems(HFModel(family, model_of_job(section)), 0.0)
        assert f"{family} has no place for model.num_mtp_layers={depths}: choose 0" in line


def test_flavor_hf_takes_the_dimensions_of_the_folder(tmp_path):
    write(tmp_path, settings_of("qwen3", "0.6B"))
    section = Model(name="qwen3", flavor="hf", hf_assets_path=str(tmp_path))
    assert section.tokenizer_path == str(tmp_path)
    assert model_of_job(section) == model_config("qwen3", "0.6B")
    other = section.model_copy(update={"name": "deepseek_v3"})
    assert "family 'qwen3': set that" in refusal(model_of_job, other)
    assert "needs model.hf_assets_path" in refusal(model_of_job, Model(name="qwen3", flavor="hf"))
    assert Model(hf_assets_path="x", tokenizer_path="bytes").tokenizer_path == "bytes"


@pytest.mark.parametrize("renamed", [False, True], ids=["published names", "own names"])
def test_kimi_linear_is_read_as_transformers_writes_it(renamed, tmp_path):
    config = model_config("kimi_linear", "gate")
    settings = HFModel("kimi_linear", config).settings()
    theirs = transformers.KimiLinearConfig(**settings)
    attends = [kind == "full_attention" for kind in theirs.layer_types]
    assert attends == [not config.recurs(layer) for layer in range(config.num_layers)]
    both = {"linear_attn_config", "first_k_dense_replace", *kimi_linear._FORM.fixed, "hidden_act"}
    plain = {key: value for key, value in settings.items() if key not in both}
    transformers.KimiLinearConfig(**plain, mlp_layer_types=theirs.mlp_layer_types).save_pretrained(
        tmp_path
    )
    settings = json.loads((tmp_path / "config.json").read_text())
    assert not both & settings.keys() - {"hidden_act"}
    if renamed:
        names = {ours: name for name, ours in kimi_linear._FORM.aliases.items()}
        settings = {names.get(key, key): value for key, value in settings.items()}
        assert "num_local_experts" in settings and "num_experts" not in settings
    assert differences(config, model_of(write(tmp_path, settings)).config) == []
    settings["layer_types"][0] = "sliding_attention"
    assert "layer_types: only linear_attention or" in refusal(model_of, write(tmp_path, settings))


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "text_config"])
def test_a_quantisation_that_is_not_known_is_refused_before_ranks_start(inside, tmp_path):
    settings = settings_of("qwen3", "gate") | {"quantization_config": {"quant_method": "gptq"}}
    around = {"model_type": "qwen3_vl", "tie_word_embeddings": True, "text_config": settings}
    write(tmp_path, around if inside else settings)
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    said = refusal(HFFolder, tmp_path)
    job = ["--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--model.name", "qwen3"]
    job += ["--checkpoint.initial_load_path", str(tmp_path), "--model.flavor", "gate"]
    line = refusal(check_all, [*job, "--training.dataset", "synthetic"], 1, 1, {})
    assert said in line and "quant_method='gptq' cannot be de-quantised" in line


@pytest.mark.parametrize("skips", [{}, {"index_skip_topk_offset": 3}])
@pytest.mark.parametrize("every", [1, 2, 4])
def test_glm_layers_that_share_keys_agree_with_transformers(every, skips, tmp_path):
    changes = {"num_hidden_layers": 12, "index_topk_freq": every, **skips}
    kinds = transformers.AutoConfig.for_model("glm_moe_dsa", **changes).indexer_types
    config = model_of(write(tmp_path, settings_of(*GLM5) | changes)).config
    assert config.indexer.shared_in == tuple(n for n, kind in enumerate(kinds) if kind == "shared")
    assert deepseek_v32.to_hf(config).get("indexer_types", kinds) == kinds
