"""The text models of published models that also see: trained alone, and laid back as they were."""

import json
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.adapters import LORA, adapted, saved_adapters
from tests.support.hf_folders import assert_same_bits, read_folder
from tests.support.refusals import failure
from tests.support.saved_runs import saved_model
from tests.support.tiers import tiered
from titan_moe.checkpoint.hf import folder, write
from titan_moe.checkpoint.hf.read import import_folder
from titan_moe.checkpoint.hf.write import export_checkpoint
from titan_moe.models.decoder import Decoder
from titan_moe.models.hf import model_of
from titan_moe.models.hf_settings import WRAPPERS, text_of
from titan_moe.runtime.errors import RunError
from titan_moe.verify.parity.check import cases, distance, load_folder
from titan_moe.verify.parity.oracle import computing_in

_MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_SEES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "depth": 1}
_QWEN = {**_SEES, "num_position_embeddings": 16, "deepstack_visual_indexes": []}
_KIMI = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
_KIMI |= {"num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4}
_LLAMA = {**_KIMI, "vision_output_dim": 16, "image_size": 16, "patch_size": 8}
_LLAMA |= {"projector_input_dim": 16, "projector_output_dim": 16}
_GEMMA = {key: value for key, value in _KIMI.items() if "pos_emb" not in key}
_GEMMA |= {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
_STEP = {"width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14}
# model_type -> a case of its text model, changes of that, and of the vision tower.
PUBLISHED = {
    "glm4v_moe": (
        "glm4_moe: no QK norm",
        {"model_type": "glm4v_moe_text", "rope_parameters": _MROPE | {"mrope_section": [1, 1, 0]}},
        _SEES,
    ),
    "gemma4": ("gemma4: untied", {"pad_token_id": 96, "vocab_size": 97}, _GEMMA),
    "kimi_k25": ("deepseek_v3: plain", {"eos_token_id": [1, 5]}, _KIMI),
    "llama4": ("llama4: plain", {}, _LLAMA),
    "qwen3_5_moe": ("qwen3_5_moe: plain", {"mamba_ssm_dtype": "float32"}, _QWEN),
    "qwen3_vl": ("qwen3: attention biases", {"model_type": "qwen3_vl_text"}, _QWEN),
    "qwen3_vl_moe": (
        "qwen3: plain",
        # The published stacks, [E, dim, 2 x width], are told by shape.
        {"model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 12},
        _QWEN,
    ),
    # Its text model's embedding has no gradient for the padding.
    "step3p7": ("step3p7: plain", {"pad_token_id": 96, "vocab_size": 97}, _STEP),
}
_NORMS = [f"{x}norm.weight" for x in ("language_model.model.", "model.language_model.", "model.")]


def _draw(kind: str) -> Any:
    name, changes, vision = PUBLISHED[kind]
    (case,) = (case for case in cases() if str(case) == name)
    text = {**case.settings, **changes}
    if "num_heads" in vision:
        vision = {**vision, "out_hidden_size": text["hidden_size"]}
    config = transformers.AutoConfig.for_model(
        kind, text_config=text, vision_config=vision, tie_word_embeddings=False
    )
    config.get_text_config()._experts_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def _save(model: Any, kind: str, folder: Any) -> dict[str, Tensor]:
    """Save a model in the published form; returns its tensors."""
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    # transformers 5.24 leaves its vision tower's name of layers in the text model's.
    stored = {name.replace("model.blocks", "model.layers"): x for name, x in stored.items()}
    for name in [name for name in stored if kind == "qwen3_vl_moe" and ".experts." in name]:
        stored[name] = stored[name].transpose(1, 2).contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return stored


def _save_wrong(tensors: dict[str, Tensor], path: Path, facts: dict[str, str]) -> None:
    """Save tensors, but one that sees is another."""
    (name, *_) = (x for x in tensors if "vision" in x or "visual" in x)
    folder.save(tensors | {name: tensors[name] + 1}, path, facts)


_DEFAULT = ["kimi_k25", "qwen3_5_moe", "qwen3_vl_moe"]


@pytest.mark.parametrize("kind", tiered(_DEFAULT, slow=sorted(PUBLISHED.keys() - _DEFAULT)))
def test_text_trains_and_is_laid_back_among_the_rest(kind, tmp_path, caplog):
    tokens = torch.randint(0, 96, (1, 20), generator=torch.Generator().manual_seed(0))
    with computing_in(torch.float64):
        whole = _draw(kind)
    stored = _save(whole, kind, tmp_path / "in")
    with computing_in(torch.float64):
        found = model_of(tmp_path / "in")
        model = Decoder(found.config)
        with caplog.at_level("INFO", logger="titan_moe"):
            load_folder(model, found, tmp_path / "in")
        assert any("tensors are not trained: " in line for line in caplog.messages)
        # In transformers 5.24 the whole Llama 4 runs with images alone.
        text = whole.language_model if kind == "llama4" else whole
        theirs, ours = text(input_ids=tokens, use_cache=False).logits, model.eval()(tokens)
        assert distance(ours, theirs) < 1e-12
        theirs.square().sum().backward()
        ours.square().sum().backward()
        their_weight = whole.get_input_embeddings().weight
        assert distance(model.tok_embeddings.weight.grad, their_weight.grad) < 1e-12

    # An import keeps the rest, and needs the folder no more.
    import_folder(tmp_path / "in", tmp_path / "imported", torch.float64)
    (tmp_path / "in").rename(tmp_path / "moved")
    with mock.patch.object(write, "save", _save_wrong):
        line = failure(export_checkpoint, tmp_path / "imported", tmp_path / "out", torch.float64)
    assert line.endswith(f" is not as in {tmp_path / 'imported/hf'}")
    export_checkpoint(tmp_path / "imported", tmp_path / "out", torch.float64)
    for name in [name for name in stored if name.endswith(("correction_bias", "router_bias"))]:
        stored[name] = stored[name].float()  # In every export.
    assert_same_bits(read_folder(tmp_path / "out"), stored)
    paths = (tmp_path / name / "config.json" for name in ("moved", "out"))
    before, after = (json.loads(path.read_text()) for path in paths)
    text = after["text_config"]
    assert text["model_type"] == before["text_config"]["model_type"]
    assert text["eos_token_id"] == before["text_config"]["eos_token_id"]
    unused = {"vision_config", "image_token_id", "architectures"} & before.keys()
    assert all(after[key] == before[key] for key in unused)

    rest = bytearray((tmp_path / "imported/hf/rest.safetensors").read_bytes())
    rest[-1] ^= 1
    (tmp_path / "imported/hf/rest.safetensors").write_bytes(rest)
    with pytest.raises(RunError, match=r"rest.safetensors is damaged: it is not what"):
        export_checkpoint(tmp_path / "imported", tmp_path / "damaged", torch.float64)

    # A run that loaded the folder changes the text alone.
    with torch.no_grad():
        model.norm.weight.add_(1)
    record = {"model": {"hf_assets_path": str(tmp_path / "moved")}}
    step = saved_model(tmp_path, model, model=found, job_record=record)
    export_checkpoint(step, tmp_path / "trained", torch.float64)
    trained = read_folder(tmp_path / "trained")
    (norm,) = (name for name in stored if name in _NORMS)
    assert torch.equal(trained[norm], stored[norm] + 1)
    assert_same_bits(trained | {norm: stored[norm]}, stored)
    opened = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "trained", dtype=torch.float64, experts_implementation="eager"
    )
    with computing_in(torch.float64), torch.no_grad():
        text = opened.language_model if kind == "llama4" else opened
        theirs = text(input_ids=tokens, use_cache=False).logits
        assert distance(theirs, model(tokens)) < 1e-7  # Their rotary frequencies are float32.


@torch.no_grad()
@pytest.mark.parametrize(
    "kind", tiered(["kimi_k25", "qwen3_vl_moe"], slow=["glm4v_moe", "qwen3_5_moe", "qwen3_vl"])
)
def test_peft_adapts_the_text_model_inside(kind, tmp_path):
    lora = LORA.model_copy(update={"targets": ["*.attention.w?", "shared_experts", "experts"]})
    tokens = torch.randint(0, 96, (1, 12), generator=torch.Generator().manual_seed(0))
    with computing_in(torch.float64):
        whole = _draw(kind)
        _save(whole, kind, tmp_path / "in")
        ours, model = adapted(tmp_path / "in", lora)
        step = saved_adapters(tmp_path, ours, model, lora, base=tmp_path / "in")
    export_checkpoint(step, tmp_path / "out", torch.float64)
    with computing_in(torch.float64):
        theirs = PeftModel.from_pretrained(whole, tmp_path / "out").eval()
        assert (
            distance(ours.eval()(tokens), theirs(input_ids=tokens, use_cache=False).logits) < 1e-10
        )


def test_every_published_model_around_a_text_model_is_tried():
    assert PUBLISHED.keys() == WRAPPERS.keys()


@pytest.mark.parametrize("kind", PUBLISHED)
def test_embeddings_are_tied_where_transformers_ties_them(kind):
    """Each model has its own rule for the key in the two tables of config.json."""
    whole, key = _draw(kind).config.to_dict(), "tie_word_embeddings"
    text, vision = whole["text_config"], whole["vision_config"]
    text.pop(key, None)
    for outside, inside in product([{}, {key: True}, {key: False}], repeat=2):
        said = {"text_config": text | inside, "vision_config": vision, "model_type": kind} | outside
        with torch.device("meta"):
            config = transformers.AutoConfig.for_model(**said)
            theirs = transformers.AutoModelForImageTextToText.from_config(config)
        ties = any("lm_head" in name for name in theirs.all_tied_weights_keys)
        assert text_of(said).get(key, False) == ties, (outside, inside)
