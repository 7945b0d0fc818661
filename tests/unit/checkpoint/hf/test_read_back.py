"""Whatever goes wrong in an export is named by the export itself, which leaves nothing then."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from tests.support.hf_folders import assert_same_bits, make_folder, read_folder, small_model
from tests.support.refusals import failure
from titan_moe.checkpoint.hf import write
from titan_moe.checkpoint.hf.folder import INDEX, SINGLE, save
from titan_moe.checkpoint.hf.read import import_folder
from titan_moe.checkpoint.hf.read_back import compare
from titan_moe.checkpoint.hf.write import export_checkpoint
from titan_moe.checkpoint.manifest import read_manifest, write_manifest
from titan_moe.models.hf_settings import TextFormat

CONFIG, MAP, TEMPLATE = "config.json", "weight_map", "chat_template.jinja"
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
ROUTER, KEYS = "model.layers.1.mlp.gate.weight", "model.layers.0.self_attn.k_proj.weight"
EXTRA = {
    "eos_token_id": [1, 4],
    "nested": {"a": {"b": [1]}},
    "auto_map": {"AutoConfig": "not_there.Config"},
    "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 0]},
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Checkpoints of a published folder in one file, and of one in two."""
    folder = tmp_path_factory.mktemp("imported")
    for name in ("one", "two"):
        source = folder / f"{name}-in"
        make_folder(source, small_model("qwen3", 2), torch.bfloat16, one_file=name == "one")
        settings = json.loads((source / CONFIG).read_text()) | EXTRA
        (source / CONFIG).write_text(json.dumps(settings))
        (source / TEMPLATE).write_text("{{ messages }}")
        import_folder(source, folder / name, torch.float32)
    chat = TextFormat({}, "{{ eos_token }}", {"<end>": 9})
    write_manifest(folder / "two", replace(read_manifest(folder / "two"), texts=chat))
    return folder


def tensors(change):
    """Changes the tensors of an export in one file."""

    def apply(folder):
        found = read_folder(folder)
        change(found)
        save(found, folder / SINGLE, {})

    return "one", apply


def put(name, change, of=None):
    return tensors(lambda x: x.update({name: change(x[of or name]).contiguous()}))


def experts(*pairs):
    """Writes the first expert of each pair as the second is."""
    names = [f"model.layers.1.mlp.experts.{{}}.{x}_proj.weight" for x in ("gate", "up", "down")]
    each = [(name.format(one), name.format(two)) for one, two in pairs for name in names]
    return tensors(lambda x: x.update({one: x[two].clone() for one, two in each}))


def table(file, change):
    """Changes a JSON file of an export in two files."""

    def apply(folder):
        found = json.loads((folder / file).read_text())
        change(found)
        (folder / file).write_text(json.dumps(found))

    return "two", apply


def cut_short(folder):
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-2])


W1 = "layers.1.moe.experts.w1: expert"
WRONG = "has other values than the checkpoint, or another type"
MISTAKES = {
    f"{W1} 4 has those of expert 3, layers.1.moe.experts.w2: expert 4 has": experts((4, 3)),
    f"{W1} 2 has those of expert 5, {W1} 5 has those of expert 2": experts((2, 5), (5, 2)),
    f"layers.1.moe.router.gate.weight {WRONG}": put(ROUTER, lambda x: x.T.reshape(x.shape)),
    f"1 tensor of another shape: {KEYS}": put(KEYS, lambda x: x.T),
    f"norm.weight {WRONG}": put(NORM, lambda x: x.nextafter(x + 1)),
    f"weight {WRONG}": put(NORM, lambda x: x.float().bfloat16().half()),
    f"{HEAD}, a tied weight, is there twice": put(HEAD, torch.clone, EMBEDDING),
    f"{INDEX} and {SECOND} do not agree on {NORM}": table(INDEX, lambda x: x[MAP].pop(NORM)),
    f"{INDEX} and {FIRST} do not agree on": table(INDEX, lambda x: x[MAP].update({NORM: FIRST})),
    f"{INDEX} says 7 bytes, but ": table(INDEX, lambda x: x["metadata"].update(total_size=7)),
    f"{SECOND} is damaged, or no safetensors file": ("two", cut_short),
    "has nested.a.b=None, not [1] as": table(CONFIG, lambda x: x["nested"]["a"].clear()),
    "eos_token_id=1, not [9, 1, 4]": table(CONFIG, lambda x: x.update(eos_token_id=1)),
    "rope_scaling.mrope_section=None": table(CONFIG, lambda x: x.pop("rope_scaling")),
    "norm_eps 1e-06 (there 0.5)": table(CONFIG, lambda x: x.update(rms_norm_eps=0.5)),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_what_is_written_wrong_is_named(line, imported, tmp_path, monkeypatch):
    checkpoint, change = MISTAKES[line]

    def changed(folder, *arguments, **how):
        change(folder)
        compare(folder, *arguments, **how)

    monkeypatch.setattr(write, "compare", changed)
    said = failure(export_checkpoint, imported / checkpoint, tmp_path / "out", torch.bfloat16)
    assert line in said.removeprefix("what was written is not right, and nothing is left of it: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rename", [False, True])
def test_files_and_type_are_those_of_the_published_folder(rename, imported, tmp_path):
    source, out = imported / "two-in", tmp_path / "out"
    shutil.copytree(imported / "two", checkpoint := tmp_path / "two")
    index = json.loads((source / INDEX).read_text())
    if rename:  # One file with an index; in another type.
        index[MAP] = dict.fromkeys(index[MAP], "weights-1.safetensors")
        (checkpoint / "hf/published.index.json").write_text(json.dumps(index))
        table(CONFIG, lambda x: x.update(dtype="float16"))[1](checkpoint / "hf")
    export_checkpoint(checkpoint, out, None)
    assert json.loads((out / INDEX).read_text())[MAP] == index[MAP]
    dtype = torch.float16 if rename else torch.bfloat16
    wanted = {name: tensor.to(dtype) for name, tensor in read_folder(source).items()}
    assert_same_bits(read_folder(out), wanted)
    key = "dtype" if rename else "torch_dtype"
    assert json.loads((out / CONFIG).read_text())[key] == str(dtype).removeprefix("torch.")
