"""The names and shapes of an export are those that vLLM and SGLang load."""

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_folders import read_folder, small_model
from titan_moe.checkpoint.hf.names import model_shapes
from titan_moe.checkpoint.hf.read import Source
from titan_moe.checkpoint.hf.write import export

_TABLES = json.loads(Path(__file__).with_name("loaders.json").read_text())["families"]


def _export(family: str, folder: Path) -> dict[str, tuple[int, ...]]:
    """Export a small model whose dimensions differ, so that no transposed tensor has the right
    shape; returns names and shapes."""
    config = small_model(family).config
    config = replace(config, hidden_dim=40, moe=replace(config.moe, hidden_dim=24))
    model = replace(small_model(family), config=config)
    shapes = model_shapes(model.config)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    # The routing's bias has no place in every family.
    tensors |= {name: torch.zeros(shapes[name]) for name in shapes if "expert_bias" in name}
    source = Source(model, shapes, lambda name, box: tensors[name][box])
    export(source, folder, torch.bfloat16)
    return {name: tuple(tensor.shape) for name, tensor in read_folder(folder).items()}


def _taken(table: dict[str, Any], settings: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a table says of a config.json."""

    def value(expression: str, **more: int) -> Any:
        return eval(expression, {}, settings | more)

    found = {}
    for pattern, shapes in table["names"].items():
        layers = range(value(table["layers"])) if "{layer}" in pattern else [0]
        experts = range(value(table["experts"])) if "{expert}" in pattern else [0]
        for layer in layers:
            for condition, shape in shapes.items():
                if value(condition, layer=layer):
                    sizes = value(f"({shape},)", layer=layer)
                    names = (pattern.format(layer=layer, expert=each) for each in experts)
                    found |= dict.fromkeys(names, sizes)
    return found


@pytest.mark.parametrize("family", _TABLES)
def test_names_and_shapes_are_those_that_engines_load(family, tmp_path):
    """Biases that engines drop, which no published model of the family has, are left out."""
    table, found = _TABLES[family], _export(family, tmp_path / "out")
    dropped = {x for x in found if any(fnmatchcase(x, pattern) for pattern in table["dropped"])}
    kept = {name: shape for name, shape in found.items() if name not in dropped}
    assert kept == _taken(table, json.loads((tmp_path / "out/config.json").read_text()))
    assert bool(dropped) == bool(table["dropped"])
