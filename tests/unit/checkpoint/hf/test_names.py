"""Tensors that are missing, superfluous or of another shape are named; harmless ones are not."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.hf_folders import make_folder, read_folder, small_model
from tests.support.refusals import failure
from titan_moe.checkpoint.hf.folder import HFFolder
from titan_moe.checkpoint.hf.names import find
from titan_moe.models.config import MLAConfig
from titan_moe.models.hf import HFModel, model_of


def _find(folder, model, change):
    """Change a folder's tensors, and look for the model's."""
    tensors = read_folder(folder)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return find(model, HFFolder(folder))


def _leave_out(word):
    def change(tensors):
        for name in [name for name in tensors if word in name]:
            del tensors[name]

    return change


def _made(path, family):
    """Returns a family's model and its folder."""
    model = small_model(family)
    make_folder(path / "in", model, torch.bfloat16, one_file=True)
    return model, path / "in"


@pytest.fixture
def deepseek(tmp_path):
    return _made(tmp_path, "deepseek_v3")


def test_all_problems_in_one_line(deepseek):
    model, folder = deepseek

    def change(tensors):
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
        tensors["model.layers.1.mlp.other.weight"] = torch.ones(3)
        tensors["model.norm.weight"] = torch.ones(33)

    assert failure(_find, folder, model, change) == (
        f"{folder} does not fit the model: "
        "1 tensor missing: model.layers.1.mlp.experts.3.up_proj.weight; "
        "1 tensor of no use to this model: model.layers.1.mlp.other.weight; "
        "1 tensor of another shape: model.norm.weight [33] (wanted [32])"
    )


def test_copies_may_be_missing_or_there(deepseek):
    model, folder = deepseek

    def change(tensors):
        del tensors["model.layers.4.embed_tokens.weight"]
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(2)

    found = _find(folder, model, change)
    # The copy that multi-token prediction embeds with takes what the embedding takes.
    assert found["mtp.layers.0.tok_embeddings.weight"].way.name == "model.embed_tokens.weight"
    assert found["mtp.layers.0.norm.weight"].way.name == "model.layers.4.shared_head.norm.weight"


def test_multi_token_prediction_is_left_out_where_it_is_not_trained(deepseek, caplog):
    model, folder = deepseek
    without = HFModel(model.family, replace(model.config, num_mtp_layers=0))
    with caplog.at_level("INFO", logger="titan_moe"):
        found = _find(folder, without, lambda tensors: None)
    assert not any("mtp" in name for name in found)
    assert any("multi-token prediction layers are left out" in line for line in caplog.messages)
    # A layer is superfluous if config.json says that there is none.
    settings = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(settings))
    line = failure(_find, folder, without, lambda tensors: None)
    assert "of no use to this model: model.layers.4." in line
    line = failure(_find, folder, model, _leave_out("layers.4."))
    assert "tensors missing: model.layers.4." in line


def test_qwen3_next_predicts_ahead_where_the_folder_has_weights_for_it(tmp_path):
    model = small_model("qwen3_next")
    tensors = make_folder(tmp_path / "in", model, torch.bfloat16, one_file=True)
    ahead = {name for name in tensors if name.startswith("mtp.")}
    published = {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"}
    assert published < ahead and "mtp.layers.0.mlp.experts.7.up_proj.weight" in ahead
    assert model_of(tmp_path / "in").config.num_mtp_layers == 1
    kept = {name: tensors[name] for name in tensors.keys() - ahead}
    save_file(kept, tmp_path / "in" / "model.safetensors")
    assert model_of(tmp_path / "in").config.num_mtp_layers == 0


def test_indexers_that_are_to_warm_up_may_be_missing(tmp_path, caplog):
    sparse, folder = _made(tmp_path, "deepseek_v32")
    attention = sparse.config.attention
    assert isinstance(attention, MLAConfig) and attention.indexer is not None
    warm_up = replace(attention, indexer=replace(attention.indexer, warm_up=True))
    warm = HFModel(sparse.family, replace(sparse.config, attention=warm_up))
    line = failure(_find, folder, warm, _leave_out("layers.0.self_attn.indexer.wk"))
    assert "1 tensor missing: model.layers.0.self_attn.indexer.wk" in line
    with caplog.at_level("INFO", logger="titan_moe"):
        found = _find(folder, warm, _leave_out(".indexer."))
    assert "norm.weight" in found and not any("indexer" in x for x in found)
    assert any("no indexers: they begin with random weights" in line for line in caplog.messages)
    line = failure(_find, folder, sparse, lambda tensors: None)
    assert "tensors missing: model.layers.0.self_attn.indexer" in line


def test_a_tied_output_may_be_there(tmp_path):
    model, folder = _made(tmp_path, "qwen3")
    assert model.config.tied_embeddings

    def change(tensors):
        assert "lm_head.weight" not in tensors
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    found = _find(folder, model, change)
    assert found["output.weight"].way.name == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("family", "name", "words"),
    [
        ("qwen3", "lm_head.weight", "tie_word_embeddings=false in config.json"),
        ("deepseek_v3", "model.layers.4.embed_tokens.weight", "model.num_mtp_layers=0"),
        ("glm4_moe", "model.layers.4.shared_head.head.weight", "model.num_mtp_layers=0"),
    ],
)
def test_a_stored_copy_with_other_values_is_refused(family, name, words, tmp_path):
    """Another model than the folder's would be trained."""
    model, folder = _made(tmp_path, family)
    copied = "model.embed_tokens.weight" if "head" not in name or family == "qwen3" else "lm_head"

    def change(tensors):
        (original,) = (tensor for key, tensor in tensors.items() if key.startswith(copied))
        tensors[name] = original.clone()
        tensors[name][-1, -1] += 1

    line = failure(_find, folder, model, change)
    assert f"{name} is not equal to {copied}" in line and f"set {words}" in line


def test_tensors_that_are_ignored_are_named(tmp_path, caplog):
    model, folder = _made(tmp_path, "qwen3_next")
    line = failure(_find, folder, model, lambda t: t.update({"mtp.other.weight": torch.ones(1)}))
    assert "of no use to this model: mtp.other.weight" in line
    without = HFModel(model.family, replace(model.config, num_mtp_layers=0))
    with caplog.at_level("INFO", logger="titan_moe"):
        _find(folder, without, lambda tensors: None)
    (line,) = caplog.messages
    assert "tensors are not trained: mtp.fc.weight" in line


def test_a_tensor_in_two_files_is_read_where_the_index_says(tmp_path, caplog):
    model = small_model("qwen3")
    folder = tmp_path / "in"
    tensors = make_folder(folder, model, torch.bfloat16)
    second = folder / "model-00002-of-00002.safetensors"
    norm = "model.norm.weight"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (other,) = {path.name for path in folder.glob("*.safetensors")} - {index["weight_map"][norm]}
    stored = load_file(folder / other)
    save_file(stored | {norm: tensors[norm] + 1}, folder / other)
    save_file({norm: tensors[norm]}, folder / "old.safetensors")
    opened = HFFolder(folder)
    assert torch.equal(opened.read(norm, (slice(0, 32),)), tensors[norm])
    assert "old.safetensors: beside the weights, not read" in caplog.messages[0]
    del index["weight_map"][norm]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"{second.name} and another file have a tensor {norm}" in failure(HFFolder, folder)


def test_files_beside_a_single_file_are_named_as_not_read(tmp_path, caplog):
    _, folder = _made(tmp_path, "qwen3")
    save_file({"model.norm.weight": torch.ones(1)}, folder / "adapter.safetensors")
    HFFolder(folder)
    assert "adapter.safetensors: beside the weights, not read" in caplog.messages[0]
