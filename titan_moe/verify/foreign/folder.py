"""Reads one step of another program from a folder, and refuses what cannot be compared.

docs/court.md says what the folder holds. Tensors have Hugging Face's names; here they get ours.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    TypeAdapter,
    ValidationError,
)
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
from titan_moe.runtime.errors import RunError, reason

FACTS = "foreign.json"
_ROWS = TypeAdapter(dict[str, NonNegativeInt])


def _axes(layout: str) -> str:
    axes = [re.fullmatch(r"(\w+)=[1-9]\d*", part) for part in layout.split(",")] if layout else []
    if None in axes or len({axis and axis[1] for axis in axes}) < len(axes):
        raise ValueError("write each axis once, such as fsdp=2,ep=4; nothing for one process")
    return layout


class AdamW(BaseModel, extra="forbid", strict=True):
    """Settings of torch's AdamW."""

    lr: PositiveFloat
    betas: tuple[float, float]
    eps: PositiveFloat
    weight_decay: NonNegativeFloat


class Facts(BaseModel, extra="forbid", strict=True):
    """The content of foreign.json."""

    program: str
    version: str
    layout: Annotated[str, AfterValidator(_axes)]
    dtype: Literal["float64", "float32", "float16", "bfloat16"]
    loss: FiniteFloat
    num_targets: int
    grad_norm: NonNegativeFloat | None = None
    max_norm: PositiveFloat | None = None
    optimizer: AdamW | None = None
    no_gradient: list[str] = []
    """Hugging Face names of parameters whose `.grad` is None."""


class ForeignStep(NamedTuple):
    """One step of another program, by our names."""

    facts: Facts
    tokens_BS: Tensor
    labels_BS: Tensor
    places: Mapping[str, Stored]
    gradients: Mapping[str, Tensor]
    means: Mapping[str, Tensor]
    """Means of the gradients that each rank holds."""
    updated: Mapping[str, Tensor]
    """Parameters after the step; empty if the folder has none."""
    activations: Mapping[str, Tensor]


def read_step(folder: Path, model: HFModel) -> ForeignStep:
    """Reads a folder. Raises ConfigError or RunError in one line for each mistake in it.

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
        raise ConfigError(f"{path} cannot be read: {reason(error)} (docs/court.md)") from None
    batch = _read_batch(folder / "batch.safetensors", facts, model.config)
    places, gradients, means = _read(folder, "gradients", model, facts.dtype, facts.no_gradient)
    updated = _read(folder, "updated", model, facts.dtype)[1]
    if updated and facts.optimizer is None:
        raise ConfigError(f"{path}: optimizer=null beside updated parameters: write its settings")
    path = folder / "activations.safetensors"
    outputs = {name: x[()].double() for name, x in opened(path).items()} if path.exists() else {}
    shapes = {name: tuple(x.shape) for name, x in outputs.items()}
    layers = {f"layers.{number}" for number in range(model.config.num_layers)}
    shape = (*batch[0].shape, model.config.dim * model.config.streams)
    compare_shapes(path, shapes, dict.fromkeys(layers & shapes.keys(), shape), {*shapes} - layers)
    return ForeignStep(facts, *batch, places, gradients, means, updated, outputs)


def _read_batch(path: Path, facts: Facts, config: ModelConfig) -> tuple[Tensor, Tensor]:
    found = {name: stored[()] for name, stored in opened(path).items()}
    kinds = {(x.dtype, x.ndim, x.shape) for x in found.values()}
    if found.keys() != {"tokens", "labels"} or len(kinds) > 1 or (torch.int64, 2) != min(kinds)[:2]:
        held = ", ".join(f"{name} {x.dtype} {list(x.shape)}" for name, x in found.items())
        raise ConfigError(f"{path} holds {held}: write tokens and labels, int64 [rows, tokens]")
    tokens_BS, labels_BS = found["tokens"], found["labels"]
    asked = labels_BS != IGNORE_INDEX
    ids, count = torch.cat([tokens_BS.flatten(), labels_BS[asked]]), int(asked.sum())
    outside = ids[(ids < 0) | (ids >= config.vocab_size)].tolist()
    for wrong, says in (
        (outside, f"an id is outside of the vocabulary of {config.vocab_size}: {outside[:1]}"),
        (count != facts.num_targets, f"{count} targets, but num_targets={facts.num_targets}"),
        (not count, "no label is a target"),
        (torch.equal(tokens_BS[asked], labels_BS[asked]), "labels are tokens: shift them by one"),
    ):
        if wrong:
            raise ConfigError(f"{path}: {says}; write the batch of this step (docs/court.md)")
    return tokens_BS, labels_BS


def _read(
    folder: Path, kind: str, model: HFModel, dtype: str, absent: Collection[str] = ()
) -> tuple[dict[str, Stored], dict[str, Tensor], dict[str, Tensor]]:
    """Returns places of our parameters, and two tensors of each: the first rank's, and the mean of
    all ranks'. Absent ones are zeros. Without a file of updates there are none.
    """
    path, parts = folder / f"{kind}.safetensors", dict[str, list[tuple[int, Tensor]]]()
    size = getattr(torch, dtype).itemsize
    for file in sorted(folder.glob(f"{kind}[-.]*safetensors")):  # One, or one a rank.
        slices = opened(file)
        with safe_open(file, "pt") as header:
            text = (header.metadata() or {}).get("rows", "{}")
        try:
            rows = _ROWS.validate_json(text)
        except ValidationError:
            raise ConfigError(f"{file}: rows={text}: write first rows by name, as JSON") from None
        for name, stored in slices.items():
            if not (values := stored[()]).is_floating_point() or values.itemsize < size:
                raise ConfigError(f"{file}: {name} is {values.dtype}: write {dtype} or finer")
            refuse_not_finite(values, f"{file}: {name}", "write a step that is finite")
            values = values.double().reshape(values.shape or (1,))
            parts.setdefault(name, []).append((rows.get(name, 0), values))
    if kind == "updated" and not parts:
        return {}, {}, {}
    theirs = {name: _assemble(f"{path}: {name}", each) for name, each in parts.items()}
    parameters = empty_model(model.config).named_parameters()
    ours = {name: tuple(p.shape) for name, p in parameters if ".indexer." not in name}
    shapes = {name: tuple(first.shape) for name, (first, _) in theirs.items()}
    ways = write_as(model, ours, dict.fromkeys(absent, ()) | shapes)
    places = {name: place for name, (place, *_) in ways.items()}
    wanted = {n: shape for place in places.values() for n, shape in place.tensors().items()}
    shapes = {name: wanted.get(name, ()) for name in absent} | shapes
    try:
        compare_shapes(path, shapes, wanted, shapes.keys() - wanted.keys())
    except RunError as error:
        remedy = f"write all under Hugging Face names; name what is None in no_gradient of {FACTS}"
        raise ConfigError(f"{error}; {remedy}") from None
    theirs = {name: (torch.zeros(wanted[name]),) * 2 for name in absent} | theirs
    copies = ({name: each[copy] for name, each in theirs.items()} for copy in (0, 1))
    first, mean = (_ours(places, tensors) for tensors in copies)
    return places, first, mean


def _ours(places: Mapping[str, Stored], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {name: torch.empty(place.shape).double() for name, place in places.items()}
    for name, place in places.items():
        copy_pieces(place, whole(place.shape), found[name], lambda name, box: theirs[name][box])
    return found


def _assemble(where: str, parts: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """Puts rows that ranks hold of a tensor together: the first rank's that has them, and means."""
    shape = max(row + len(x) for row, x in parts), *parts[0][1].shape[1:]
    first, total = torch.full(shape, torch.nan).double(), torch.zeros(shape).double()
    count = torch.zeros(shape[0], *[1] * (len(shape) - 1))
    if any(x.shape[1:] != shape[1:] for _, x in parts):
        raise ConfigError(f"{where} has another shape on another rank: cut dim 0 alone")
    for row, values in reversed(parts):
        first[row : row + len(values)] = values
        total[row : row + len(values)] += values
        count[row : row + len(values)] += 1
    if first.isnan().any():
        raise ConfigError(f"{where}: some rows are on no rank: write them")
    return first, total / count
