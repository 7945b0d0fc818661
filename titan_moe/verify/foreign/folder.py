"""Reads one step of another program from a folder, and refuses what cannot be compared.

docs/court.md says what the folder holds. Tensors have Hugging Face's names; here they get ours.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import BaseModel, Field, FiniteFloat, PositiveFloat, ValidationError
from safetensors import safe_open
from torch import Tensor

from titan_moe.checkpoint.hf.folder import opened, refuse_not_finite
from titan_moe.checkpoint.hf.names import compare_shapes, write_as
from titan_moe.checkpoint.hf.pieces import Stored, whole
from titan_moe.checkpoint.hf.read import copy_pieces
from titan_moe.config.errors import ConfigError
from titan_moe.config.parse import mistake
from titan_moe.data.batch import IGNORE_INDEX
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import HFModel
from titan_moe.models.lora import empty_model
from titan_moe.runtime.errors import RunError

FACTS = "foreign.json"


class AdamW(BaseModel, extra="forbid", strict=True):
    """Settings of torch's AdamW."""

    lr: PositiveFloat
    betas: tuple[float, float]
    eps: FiniteFloat
    weight_decay: FiniteFloat


class Facts(BaseModel, extra="forbid", strict=True):
    """The content of foreign.json."""

    program: str
    version: str
    layout: str = Field(pattern=r"^(\w+=[1-9]\d*(,\w+=[1-9]\d*)*)?$")
    dtype: Literal["float64", "float32", "float16", "bfloat16"]
    loss: FiniteFloat
    num_targets: int
    grad_norm: FiniteFloat | None
    max_norm: PositiveFloat | None
    optimizer: AdamW | None
    no_gradient: list[str] = []
    """Hugging Face names of parameters whose `.grad` is None."""


Tensors = Mapping[str, Tensor]
"""[2, ...] by name: the first rank's copy; the sum of ranks' copies, or the first if all are equal.
"""


class ForeignStep(NamedTuple):
    """One step of another program, by our names."""

    facts: Facts
    tokens_BS: Tensor
    labels_BS: Tensor
    places: Mapping[str, Stored]
    gradients: Tensors
    updated: Tensors
    """Empty if the folder has none."""
    activations: Mapping[str, Tensor]


def read_step(folder: Path, model: HFModel) -> ForeignStep:
    """Reads a folder. Raises ConfigError or RunError in one line for mistakes in it.

    Args:
        model: the model that took the step, without multi-token prediction.
    """
    path = folder / FACTS
    try:
        text = path.read_bytes()
        json.loads(text)
        facts = Facts.model_validate_json(text)
    except ValidationError as error:
        lines = [mistake(each, str(path), Facts.model_fields) for each in error.errors()]
        raise ConfigError(lines) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error} (docs/court.md)") from None
    tokens_BS, labels_BS = _read_batch(folder / "batch.safetensors", facts, model.config)
    places, gradients = _read(folder, "gradients", model, facts.no_gradient)
    updated: Tensors = {}
    if facts.optimizer is not None and _files(folder, "updated"):
        _, updated = _read(folder, "updated", model, [])
    path = folder / "activations.safetensors"
    activations = {name: x[:].double() for name, x in opened(path).items()} if path.exists() else {}
    shape = (*tokens_BS.shape, model.config.dim * model.config.streams)
    layers = {f"layers.{n}": shape for n in range(model.config.num_layers)}
    shapes = {name: tuple(x.shape) for name, x in activations.items()}
    wanted = {name: shape for name, shape in layers.items() if name in activations}
    compare_shapes(path, shapes, wanted, activations.keys() - layers.keys())
    return ForeignStep(facts, tokens_BS, labels_BS, places, gradients, updated, activations)


def _read_batch(path: Path, facts: Facts, config: ModelConfig) -> tuple[Tensor, Tensor]:
    found = {name: stored[:] for name, stored in opened(path).items()}
    kinds = {(x.dtype, x.ndim, x.shape) for x in found.values() if x.dtype == torch.int64}
    if found.keys() != {"tokens", "labels"} or len(kinds) != 1 or found["tokens"].ndim != 2:
        held = ", ".join(f"{name} {x.dtype} {list(x.shape)}" for name, x in found.items())
        raise ConfigError(
            f"{path} holds {held}: write tokens and labels, int64 [sequences, tokens]"
        )
    tokens_BS, labels_BS = found["tokens"], found["labels"]
    asked = labels_BS != IGNORE_INDEX
    ids, count = torch.cat([tokens_BS.flatten(), labels_BS[asked]]), int(asked.sum())
    if outside := ids[(ids < 0) | (ids >= config.vocab_size)].tolist():
        says = f"has the id {outside[0]}, outside of the vocabulary of {config.vocab_size}"
        raise ConfigError(f"{path} {says}: write the ids that this model was given")
    if not count or facts.num_targets != count:
        says = f"labels have {count} targets, but num_targets={facts.num_targets} in {FACTS}"
        raise ConfigError(f"{path}: {says}: write the batch of this step")
    if torch.equal(tokens_BS[asked], labels_BS[asked]):
        raise ConfigError(f"{path}: labels equal tokens: write the target of position s at s")
    return tokens_BS, labels_BS


def _files(folder: Path, kind: str) -> list[Path]:
    return sorted([*folder.glob(f"{kind}.safetensors"), *folder.glob(f"{kind}-*.safetensors")])


def _read(
    folder: Path, kind: str, model: HFModel, absent: Collection[str]
) -> tuple[dict[str, Stored], Tensors]:
    """Returns the places of our parameters and their tensors; absent ones are zeros."""
    path, parts = folder / f"{kind}.safetensors", dict[str, list[tuple[int, Tensor]]]()
    for file in _files(folder, kind):
        slices = opened(file)
        with safe_open(file, "pt") as header:
            rows = json.loads((header.metadata() or {}).get("rows", "{}"))
        for name, stored in slices.items():
            values = stored[()].double()
            refuse_not_finite(values, f"{file}: {name}", "write a step that is finite")
            parts.setdefault(name, []).append((int(rows.get(name, 0)), values))
    theirs = {name: _assemble(f"{path}: {name}", each) for name, each in parts.items()}
    parameters = empty_model(model.config).named_parameters()
    ours = {name: tuple(p.shape) for name, p in parameters if ".indexer." not in name}
    shapes = {name: tuple(tensor.shape[1:]) for name, tensor in theirs.items()}
    ways = write_as(model, ours, shapes | dict.fromkeys(absent, ()))
    places = {name: place for name, (place, *_) in ways.items()}
    wanted = {n: shape for place in places.values() for n, shape in place.tensors().items()}
    zeros = {name: torch.zeros(2, *wanted.get(name, ())).double() for name in absent}
    shapes |= {name: tuple(tensor.shape[1:]) for name, tensor in zeros.items()}
    try:
        compare_shapes(path, shapes, wanted, shapes.keys() - wanted.keys())
    except RunError as error:
        raise ConfigError(
            f"{error}: list a gradient that is None in no_gradient of {FACTS}"
        ) from None
    found = {name: torch.empty(2, *place.shape).double() for name, place in places.items()}
    for name, place in places.items():
        for copy, values in enumerate(found[name]):
            read = lambda name, box, copy=copy: (zeros | theirs)[name][copy][box]  # noqa: E731
            copy_pieces(place, whole(place.shape), values, read)
    return places, found


def _assemble(where: str, parts: list[tuple[int, Tensor]]) -> Tensor:
    """Puts ranks' rows of a tensor together; returns [2, ...], see `Tensors`."""
    size, inner = max(row + len(values) for row, values in parts), parts[0][1].shape[1:]
    first, total = (torch.zeros(size, *inner, dtype=torch.float64) for _ in range(2))
    covered = torch.zeros(size, dtype=torch.bool)
    for row, values in reversed(parts):
        if values.shape[1:] != inner:
            raise ConfigError(f"{where} has another shape on another rank: cut dim 0 alone")
        first[row : row + len(values)] = values
        total[row : row + len(values)] += values
        covered[row : row + len(values)] = True
    if not covered.all():
        raise ConfigError(f"{where}: no rank has row {covered.tolist().index(False)}: write it")
    equal = all(torch.allclose(first[row : row + len(x)], x, 1e-3, 0) for row, x in parts)
    return torch.stack([first, first if equal else total])
