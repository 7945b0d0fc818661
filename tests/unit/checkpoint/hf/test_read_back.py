"""Whatever goes wrong in an export is named by the export itself, which leaves nothing then."""

import json

import pytest
import torch

from tests.support.hf_folders import assert_same_bits, make_folder, read_folder, small_model
from tests.support.packing import filled
from tests.support.refusals import failure
from tests.support.saved_runs import plain_checkpointer
from titan_moe.checkpoint.hf import write
from titan_moe.checkpoint.hf.read import import_folder
from titan_moe.checkpoint.hf.write import export_checkpoint

LAYER = "model.layers.1.mlp"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
NORM = "model.norm.weight"
EXTRA = {
    "eos_token_id": [1, 4],
    "pad_token_id": 0,
    "use_cache": True,
    "nested": {"a": {"b": [1]}},
    "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 0]},
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Checkpoints of a published folder in several files, and of one in one file."""
    folder = tmp_path_factory.mktemp("imported")
    for name in ("sharded", "single"):
        source = folder / f"{name}-in"
        make_folder(source, small_model("qwen3", 2), torch.bfloat16, one_file=name == "single")
        settings = json.loads((source / "config.json").read_text()) | EXTRA
        (source / "config.json").write_text(json.dumps(settings))
        (source / "chat_template.jinja").write_text("{{ messages }}")
        import_folder(source, folder / name, torch.float32)
    return folder


def refused(monkeypatch, checkpoint, out, *, saved=None, beside=None):
    """Returns the line of an export that goes wrong where tensors are saved, or what is beside."""
    save, assets = write.save, write.write_assets

    def wrong_save(tensors, path, facts):
        if saved is not None:
            saved(tensors)
        save(tensors, path, facts)

    def wrong_assets(*arguments):
        carried = assets(*arguments)
        if beside is not None:
            beside(arguments[5])
        return carried

    monkeypatch.setattr(write, "save", wrong_save)
    monkeypatch.setattr(write, "write_assets", wrong_assets)
    line = failure(export_checkpoint, checkpoint, out, torch.bfloat16)
    assert line.startswith(f"{out} was not written right, and is removed: ")
    assert not list(out.parent.iterdir())
    return line


def _experts(tensors, number):
    names = [f"{LAYER}.experts.{number}.{each}.weight" for each in PROJECTIONS]
    return [name for name in names if name in tensors]


def twice(tensors):
    for name, other in zip(_experts(tensors, 4), _experts(tensors, 3), strict=True):
        tensors[name] = tensors[other].clone()


def swapped(tensors):
    for name, other in zip(_experts(tensors, 5), _experts(tensors, 2), strict=True):
        tensors[name], tensors[other] = tensors[other], tensors[name]


def changed(name, change):
    def apply(tensors):
        if name in tensors:
            tensors[name] = change(tensors[name]).contiguous()

    return apply


def flipped(tensor):
    tensor.view(torch.int16)[-1] ^= 1
    return tensor


TENSORS = {
    "expert twice": (twice, "layers.1.moe.experts.w1: expert 4 holds the weights of expert 3"),
    "experts swapped": (
        swapped,
        "layers.1.moe.experts.w2: expert 2 holds the weights of expert 5, "
        "layers.1.moe.experts.w2: expert 5 holds the weights of expert 2",
    ),
    "transposed": (
        changed(f"{LAYER}.gate.weight", lambda x: x.T.reshape(x.shape)),
        "layers.1.moe.router.gate.weight has other values than the checkpoint",
    ),
    "another shape": (
        changed("model.layers.0.self_attn.q_proj.weight", lambda x: x.T),
        "of another shape: model.layers.0.self_attn.q_proj.weight",
    ),
    "a bit": (changed(NORM, flipped), "norm.weight has other values than the checkpoint"),
    "another type": (changed(NORM, torch.Tensor.half), f"{NORM} is torch.float16, not torch.bf"),
    "tied weight": (
        lambda x: x.update({"lm_head.weight": x["model.embed_tokens.weight"].clone()}),
        "lm_head.weight, a tied weight, is there twice",
    ),
    "one too many": (lambda x: x.update(more=torch.ones(1)), "1 tensor of no use to this model"),
    "one lost": (lambda x: x.pop(NORM), f"1 tensor missing: {NORM}"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_wrong_tensors_are_named(kind, imported, tmp_path, monkeypatch):
    mistake, words = TENSORS[kind]
    assert words in refused(monkeypatch, imported / "single", tmp_path / "out", saved=mistake)


def edited(file, change):
    def apply(folder):
        table = json.loads((folder / file).read_text())
        change(table)
        (folder / file).write_text(json.dumps(table))

    return apply


def cut_short(folder):
    file = max(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-2])


INDEX, CONFIG = "model.safetensors.index.json", "config.json"
BESIDE = {
    "not in the index": (
        edited(INDEX, lambda table: table["weight_map"].pop(NORM)),
        f"{NORM} is in model-00002-of-00002.safetensors, but {INDEX} does not say so",
    ),
    "another file in the index": (
        edited(INDEX, lambda x: x["weight_map"].update({NORM: "model-00001-of-00002.safetensors"})),
        f"{NORM} is not in model-00001-of-00002.safetensors, as {INDEX} says",
    ),
    "total size": (
        edited(INDEX, lambda table: table["metadata"].update(total_size=7)),
        "says 7 bytes, but the tensors have",
    ),
    "cut short": (cut_short, "model-00002-of-00002.safetensors is damaged, or no safetensors"),
    "key dropped": (edited(CONFIG, lambda x: x.pop("use_cache")), "use_cache=None, not True"),
    "deep key": (edited(CONFIG, lambda x: x["nested"]["a"].clear()), "nested.a.b=None, not [1]"),
    "ends": (edited(CONFIG, lambda x: x.update(eos_token_id=1)), "eos_token_id=1, not [1, 4]"),
    "positions": (
        edited(CONFIG, lambda table: table.pop("rope_scaling")),
        "rope_scaling.mrope_section=None, not [1, 1, 0]",
    ),
    "dimension": (edited(CONFIG, lambda x: x.update(rms_norm_eps=0.5)), "norm_eps 1e-06 (there 0."),
    "generation": (
        edited("generation_config.json", lambda table: table.update(top_k=1)),
        "generation_config.json is not as in",
    ),
    "template": (lambda x: (x / "chat_template.jinja").unlink(), "chat_template.jinja is not as"),
}


@pytest.mark.parametrize("kind", BESIDE)
def test_what_is_wrong_beside_tensors_is_named(kind, imported, tmp_path, monkeypatch):
    mistake, words = BESIDE[kind]
    checkpoint = imported / "sharded"
    assert words in refused(monkeypatch, checkpoint, tmp_path / "out", beside=mistake)


def test_files_and_type_are_those_of_the_published_folder(imported, tmp_path):
    export_checkpoint(imported / "sharded", tmp_path / "out", None)
    source = imported / "sharded-in"
    own, theirs = (json.loads((x / INDEX).read_text()) for x in (tmp_path / "out", source))
    assert own["weight_map"] == theirs["weight_map"]
    for path in source.glob("*.safetensors"):
        assert (tmp_path / "out" / path.name).stat().st_size == path.stat().st_size
    assert_same_bits(read_folder(tmp_path / "out"), read_folder(source))
    settings = json.loads((source / CONFIG).read_text()) | {"dtype": "float16"}
    (imported / "sharded/hf" / CONFIG).write_text(json.dumps(settings))
    export_checkpoint(imported / "sharded", tmp_path / "half", None)
    assert {x.dtype for x in read_folder(tmp_path / "half").values()} == {torch.float16}
    found = json.loads((tmp_path / "half" / CONFIG).read_text())
    assert found["dtype"] == "float16" and "torch_dtype" not in found


@pytest.mark.parametrize("difference", [0, 1e-6])
def test_experts_may_be_equal_as_those_of_the_checkpoint_alone(difference, tmp_path):
    model = small_model("mixtral", 1)
    plain = filled(model.config)
    with torch.no_grad():
        for weight in (getattr(plain.layers["0"].moe.experts, name) for name in ("w1", "w2", "w3")):
            weight[2] = weight[2].bfloat16()
            weight[5] = weight[2] * (1 + difference)
    checkpointer = plain_checkpointer(tmp_path, plain, model=model)
    checkpointer.save(1, {})
    step = tmp_path / "checkpoint/step-1"
    export_checkpoint(step, tmp_path / "float32", torch.float32)
    if difference:
        line = failure(export_checkpoint, step, tmp_path / "out", torch.bfloat16)
        assert "layers.0.moe.experts: experts 2, 5 are equal in torch.bfloat16, but not in" in line
    else:
        export_checkpoint(step, tmp_path / "out", torch.bfloat16)
