"""Adapters as a PEFT folder, and back: the form in which the library `peft` keeps LoRA.

A layer has `lora_A.weight` [r, in] and `lora_B.weight` [out, r]. Those of E stacked experts are
[E * r, in], an expert's ranks together, and [out, r * E], a rank's experts together. Gate and up
projections are one stack, with one A. Of two stacks in one module the second wraps the first, whose
name gets `.base_layer`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_moe.checkpoint.digests import MANIFEST, check_sums, write_sums
from titan_moe.checkpoint.folder import new_folder
from titan_moe.checkpoint.hf.assets import asset_folders, origin_of
from titan_moe.checkpoint.hf.folder import WIDER, opened, refuse_not_finite, save
from titan_moe.checkpoint.hf.names import Shapes, compare_shapes, model_shapes, way_in_memory
from titan_moe.checkpoint.hf.pieces import Piece, Stored, whole
from titan_moe.checkpoint.hf.read import Source
from titan_moe.checkpoint.tensors import MODEL
from titan_moe.config.job_config import Lora
from titan_moe.distributed.agreement import on_every_rank, on_rank_zero
from titan_moe.distributed.boxes import Box
from titan_moe.distributed.dtensor import local_part, local_slices
from titan_moe.models.decoder import ADAPTER
from titan_moe.models.hf import HFModel, read_settings, wrapper_of
from titan_moe.models.hf_settings import WRAPPERS
from titan_moe.models.lora import pairs_of
from titan_moe.runtime.errors import RunError, listed, reason
from titan_moe.runtime.log import log_on_rank_zero

SETTINGS = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
# The stack that comes first in each class of experts.
_INNER = ("gate_up_proj", "up_proj")
# Classes of experts that do not tell `peft` that their stacks are [E, in, out]: it takes the two
# dims for out and in.
_UNTOLD = ("llama4",)
# transformers 5 has this text model elsewhere in memory than in files: where Qwen3-VL has its own.
_IN_MEMORY = {"kimi_k25": WRAPPERS["qwen3_vl"]}
# In a model with experts `peft` (0.21) takes modules of these names for the experts' own.
_TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj")
# Beginnings of keys that change no value here, or are looked at; any other that is set is refused.
_UNREAD: tuple[str, ...] = ("task_", "auto_", "peft_", "base_", "revision", "inference_", "target_")
_UNREAD += ("exclude_", "layers_", "lora_dropout", "megatron_core", "qalora_group", "init_")
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "orthogonal")


class Pair(NamedTuple):
    """The adapter of one Hugging Face tensor: names of our A, and which rows of B are ours."""

    tensor: str
    a: str
    columns: int
    """A has so many columns."""
    shape: tuple[int, ...]
    """B has this shape: [out, r], or [E, out, r]."""
    rows: list[tuple[str, Piece]]
    swapped: bool
    """A and B take each other's place."""

    @property
    def keys(self) -> tuple[str, str]:
        """The names of A and B in the file."""
        module, _, parameter = self.tensor.rpartition(".")
        layer = f"{_PREFIX}{module}{'.base_layer' * (parameter in _INNER)}"
        return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of A and B in the file."""
        *experts, rows, rank = self.shape
        ranks = prod(experts) * rank
        into, out = (rows, self.columns) if self.swapped else (self.columns, rows)
        return (ranks, into), (out, ranks)

    def places(self, a: Tensor, b: Tensor) -> Iterator[tuple[str, Box, Tensor]]:
        """Yields the boxes of our tensors, by name, and the views of the file's A and B that hold
        them."""
        if len(self.shape) == 3:
            experts = self.shape[0]
            a, b = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)
        if self.swapped:
            a, b = b.mT, a.mT
        yield self.a, whole(a.shape), a
        for name, piece in self.rows:
            yield name, piece.ours, b[piece.theirs]


def pairs_there(model: HFModel, shapes: Shapes, folders: Sequence[Path] = ()) -> list[Pair]:
    """The adapters of each Hugging Face tensor that has some, as transformers has it in memory.

    Args:
        shapes: of our tensors, by name.
        folders: where the config.json of the published model may be, the likeliest first: it tells
            whether tensors have the names of a text model inside another one.

    Raises RunError for what `peft` cannot hold.
    """
    if (origin := origin_of(model, folders)) is not None:
        settings = read_settings(origin)
        wrapper = _IN_MEMORY.get(settings.get("model_type", ""), wrapper_of(settings))
        model = replace(model, wrapper=wrapper)
    found: dict[str, Pair] = {}
    remedy = "leave it out of lora.targets; titan-moe hf merge writes the whole model"
    for weight, (a, b) in pairs_of(shapes).items():
        if weight.startswith("mtp."):
            raise RunError(f"{b}: `peft` has no multi-token prediction: {remedy}")
        way = way_in_memory(model, weight)
        stored = Stored(weight, shapes[b], replace(way, transposed=False))
        ((tensor, shape),) = stored.tensors().items()
        swapped = way.transposed and model.family in _UNTOLD
        pair = found.setdefault(tensor, Pair(tensor, a, shapes[a][-1], shape, [], swapped))
        pair.rows.extend((b, piece) for piece in stored.pieces(whole(stored.shape)))
        if way.rows != "whole" and ".experts." not in weight:
            raise RunError(
                f"{b}: `peft` has one A for all rows of {tensor}, which are several layers here: "
                + remedy
            )
    return [*found.values()]


def export_adapters(source: Source, target: Path, dtype: torch.dtype | None) -> int:
    """Write a checkpoint's adapters as a PEFT folder, and compare what is read of it; returns its
    tensors' bytes. Collective.

    Args:
        dtype: None: as they are stored.

    Raises RunError in one line; nothing is left then.
    """
    doing = f"cannot export to {target}"
    shapes = {name: shape for name, shape in source.shapes.items() if ADAPTER in name}
    pairs = on_every_rank(lambda: pairs_there(source.model, shapes, source.folders), doing=doing)
    lora = Lora(**source.job["lora"])
    num_bytes = sum(map(prod, shapes.values())) * (dtype or torch.float32).itemsize

    def write() -> None:
        ours = {name: source.read(name, whole(shape)) for name, shape in shapes.items()}
        ours = {name: values.to(dtype or values.dtype) for name, values in ours.items()}
        for name, values in ours.items():
            refuse_not_finite(values, name, WIDER)
        tensors: dict[str, Tensor] = {}
        for pair in pairs:
            a, b = (torch.empty(shape, dtype=ours[pair.a].dtype) for shape in pair.shapes)
            tensors |= zip(pair.keys, (a, b), strict=True)
            for name, box, values in pair.places(a, b):
                values.copy_(ours[name][box])
        save(tensors, aside / WEIGHTS, {})
        settings = _settings(source.model, lora, pairs, _published_base(source.job))
        (aside / SETTINGS).write_text(json.dumps(settings, indent=2))
        found = read_adapters(aside, source.model, lora, source.folders)
        if unlike := [name for name, values in ours.items() if not values.equal(found[name])]:
            raise RunError(f"{target} was not written as it should be: {listed(unlike)}")

    with new_folder(target, num_bytes, doing=doing) as aside:
        on_rank_zero(write, doing=doing)
        source.verify(doing=doing)
        write_sums(aside, doing=doing)
    return num_bytes


def base_of(job: Mapping[str, Any]) -> str | None:
    """The weights that a run began with, as its configuration names them."""
    initial = job.get("checkpoint", {}).get("initial_load_path")
    return initial or job.get("model", {}).get("hf_assets_path")


def _published_base(job: Mapping[str, Any]) -> str | None:
    """The path of the Hugging Face folder that a run began with, for `peft`; None if there is none,
    as with a checkpoint of ours, which `peft` cannot open."""
    base = base_of(job)
    return str(Path(base).absolute()) if base and not (Path(base) / MANIFEST).exists() else None


def _settings(
    model: HFModel, lora: Lora, pairs: Sequence[Pair], base: str | None
) -> dict[str, Any]:
    names = [pair.tensor for pair in pairs]
    taken = tuple(f".{name}.weight" for name in _TAKEN_FOR_EXPERTS if model.config.moe is not None)
    linear = [name for name in names if name.endswith(".weight") and not name.endswith(taken)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "fan_in_fan_out": False,
        "target_modules": [name.removesuffix(".weight") for name in linear],
        "target_parameters": [name for name in names if name not in linear],
        **_wanted(lora),
    }


def _wanted(lora: Lora) -> dict[str, Any]:
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha  # An integer, mostly.
    scale = {"r": lora.rank, "lora_alpha": alpha, "use_rslora": lora.rank_stabilised}
    return scale | {"bias": "none"}


def load_adapters(
    model: HFModel, job_record: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Fill this rank's adapters, plain or DTensors, with those of a job's lora.initial_load_path,
    if it names one. Collective.

    Args:
        tensors: of the model or a part of it, as `model_tensors` names them; others stay.

    Raises RunError in one line for a folder that is not of these adapters.
    """
    lora = Lora(**job_record.get("lora", {}))
    if lora.initial_load_path is None:
        return
    folder = Path(lora.initial_load_path)
    doing = f"cannot load {folder}"
    check_sums(folder, doing=doing)
    folders = asset_folders(folder, job_record)
    found = on_every_rank(lambda: read_adapters(folder, model, lora, folders), doing=doing)
    for name, values in found.items():
        if (tensor := tensors.get(MODEL + name)) is not None:
            local_part(tensor).detach().copy_(values[local_slices(tensor)])
    log_on_rank_zero("loaded %s", folder)


def read_adapters(
    folder: Path, model: HFModel, lora: Lora, folders: Sequence[Path] = ()
) -> dict[str, Tensor]:
    """The adapters of a PEFT folder, whole, by our names, in the type that they are stored in.

    Args:
        lora: whose targets, rank and factor the folder must have.
        folders: as `pairs_there` takes them.

    Raises RunError in one line for a folder that is not of these adapters.
    """
    shapes = model_shapes(model.config, lora)
    pairs = pairs_there(model, shapes, folders)
    stored = _opened(folder, pairs, lora)
    found: dict[str, Tensor] = {}
    for pair in pairs:
        both = {key: stored[key][:] for key in pair.keys}
        for key, values in both.items():
            refuse_not_finite(values, f"{folder / WEIGHTS}: {key}")
        for name, box, values in pair.places(*both.values()):
            found.setdefault(name, values.new_empty(shapes[name]))[box] = values
    return found


def _opened(folder: Path, pairs: Sequence[Pair], lora: Lora) -> dict[str, Any]:
    """The tensors of a PEFT folder: slices of the library."""
    try:
        settings = json.loads((folder / SETTINGS).read_bytes())
        stored = opened(folder / WEIGHTS)
        _refuse_others(folder / SETTINGS, settings, lora)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RunError(f"{folder} is no PEFT folder: {SETTINGS}: {reason(error)}") from None
    there = {name: tuple(values.get_shape()) for name, values in stored.items()}
    types = {name: values.get_dtype() for name, values in stored.items()}
    if others := [name for name, dtype in types.items() if not dtype.startswith(("F", "BF"))]:
        raise RunError(f"{folder}: {listed(others)} holds no floating-point numbers")
    wanted: dict[str, tuple[int, ...]] = {}
    for pair in pairs:
        wanted |= zip(pair.keys, pair.shapes, strict=True)
    compare_shapes(folder, there, wanted, there.keys() - wanted.keys())
    return stored


def _refuse_others(path: Path, found: Mapping[str, Any], lora: Lora) -> None:
    """Raises RunError for settings of other adapters than [lora]'s."""
    wanted, found = {"peft_type": "LORA", **_wanted(lora)}, {"use_rslora": False, **found}
    lines = [
        f"{key}={found.get(key)!r} ([lora] makes it {value!r})"
        for key, value in wanted.items()
        if found.get(key) != value
    ]
    for key, value in (("rank_pattern", wanted["r"]), ("alpha_pattern", wanted["lora_alpha"])):
        if any(own != value for own in (found.get(key) or {}).values()):
            lines.append(f"{key}={found[key]!r} (all layers must have {value})")
    if (begun := found.get("init_lora_weights")) not in _PLAIN_BEGINNINGS:
        lines.append(f"init_lora_weights={begun!r} (it may have changed the base)")
    for key in sorted(found.keys() - wanted.keys() - {"rank_pattern", "alpha_pattern"}):
        if found[key] and not key.startswith(_UNREAD):
            lines.append(f"{key}={found[key]!r} is not supported")
    if lines:
        raise RunError(f"{path} is not of these adapters: {'; '.join(lines)}")
