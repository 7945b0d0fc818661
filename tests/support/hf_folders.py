"""Hugging Face folders of random weights, of any family and in any of the forms that are read."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor

from titan_moe.checkpoint.hf.names import EXPERT_BIAS, model_shapes, write_as
from titan_moe.checkpoint.hf.pieces import Stored
from titan_moe.models.hf import HFModel
from titan_moe.models.registry import FAMILIES, model_config

ALONE = tuple(family for family in FAMILIES if family != "step3p7")
"""Families whose text models transformers has a class of; it has Step-3.7's inside of another."""
_OTHERS = {"qwen3_5_moe": ("qwen3_next", "gate"), "glm4_moe_lite": ("glm4_moe", "gate_flash")}


def small_model(family: str, num_layers: int = 4) -> HFModel:
    """A family's gate flavor, with fewer layers; "qwen3_5_moe" is qwen3_next with other names, and
    "glm4_moe_lite" the latent attention of glm4_moe."""
    renamed = family == "qwen3_5_moe"
    family, flavor = _OTHERS.get(family, (family, "gate"))
    config = replace(model_config(family, flavor), num_layers=num_layers)
    if renamed:
        config = replace(config, recurrent=replace(config.recurrent, files_join_heads=False))
    return HFModel(family, config)


def make_folder(
    folder: Path, model: HFModel, dtype: torch.dtype, *, one_file: bool = False, fused: bool = False
) -> dict[str, Tensor]:
    """Write a folder and return its tensors in the published form.

    With `fused` the second way of each tensor, where there is one, is the stored one.
    """
    torch.manual_seed(0)
    targets = write_as(model, model_shapes(model.config))
    published: dict[str, Tensor] = {}
    # What published code keeps in float32.
    wide = (".A_log", ".dt_bias", ".mixer.D", ".e_score_correction_bias")
    wide += (".gate.bias", ".router_bias")
    wide += (".gate.weight",) * any(name.endswith(EXPERT_BIAS) for name in targets)
    for ways in targets.values():
        for way in ways:
            for theirs, shape in way.tensors().items():
                of_type = torch.float32 if theirs.endswith(wide) or "hc_" in theirs else dtype
                drawn = (torch.randn(shape) / 4).to(of_type)
                if theirs.endswith(".tid2eid"):
                    drawn = torch.randint(0, 8, shape)
                published.setdefault(theirs, drawn)
        for copy in ways[1:]:
            published[copy.way.name] = published[ways[0].way.name].clone()
    stored = dict(published)
    if fused:
        _fuse(stored, targets)
    folder.mkdir(parents=True)
    size = sum(tensor.nbytes for tensor in stored.values())
    save_torch_state_dict(stored, folder, max_shard_size=size if one_file else size * 2 // 3)
    (folder / "config.json").write_text(json.dumps(model.settings() | {"eos_token_id": 1}))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    return published


def _fuse(stored: dict[str, Tensor], targets: dict[str, list[Stored]]) -> None:
    """Stack experts that are stored one by one, gate and up projections in one tensor."""
    for name, (way, *_) in targets.items():
        if not name.endswith(("experts.w1", "experts.w2")):
            continue
        ways = [way, targets[name.replace("w1", "w3")][0]] if name.endswith("w1") else [way]
        stacks = [torch.stack([stored.pop(theirs) for theirs in way.tensors()]) for way in ways]
        kind = "gate_up_proj" if name.endswith("w1") else "down_proj"
        stored[way.way.name.partition("{expert}")[0] + kind] = torch.cat(stacks, 1)


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by the reference implementation."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Same names, types and bits."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name
