"""A whole model in this process alone, from a checkpoint or a Hugging Face folder."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from titan_moe.checkpoint.hf.assets import asset_folders
from titan_moe.checkpoint.hf.convert import model_of_manifest
from titan_moe.checkpoint.hf.folder import HFFolder, is_hf_folder
from titan_moe.checkpoint.hf.names import find
from titan_moe.checkpoint.hf.reading import fill_tensors
from titan_moe.checkpoint.hf.shapes import model_shapes
from titan_moe.checkpoint.manifest import read_manifest
from titan_moe.checkpoint.safe_reader import SafeReader
from titan_moe.checkpoint.tensors import MODEL
from titan_moe.models.config import ModelConfig
from titan_moe.models.decoder import Decoder, move_off_meta
from titan_moe.models.hf import HFModel, model_of


class Loaded(NamedTuple):
    """A model to evaluate, and the tokenizers that may be its own, the likeliest first."""

    model: Decoder
    tokenizers: list[str]
    """As model.tokenizer_path."""


@torch.no_grad()
def load_alone(path: Path, *, dtype: torch.dtype, device: torch.device) -> Loaded:
    """Build and fill the model of a step-N folder or of a Hugging Face folder.

    Layers of multi-token prediction are left out: they serve training alone. Raises RunError or
    ConfigError in one line each.
    """
    if is_hf_folder(path):
        wanted = _without_mtp(model_of(path))
        with HFFolder(path) as folder:
            found = find(wanted, folder, model_shapes(wanted.config))
            model = _empty(wanted.config, dtype, device)
            fill_tensors(model.state_dict(keep_vars=True), found, folder)
        return Loaded(model, [str(path)])
    manifest = read_manifest(path)
    wanted = _without_mtp(model_of_manifest(manifest, path))
    reader = SafeReader(path)
    model = _empty(wanted.config, dtype, device)
    tensors = model.state_dict(keep_vars=True)
    for name, box in reader.chunks(MODEL):
        if (tensor := tensors.get(name.removeprefix(MODEL))) is not None:
            tensor[box].copy_(reader.read_chunk(name, box))
    named = [str(folder) for folder in asset_folders(path, manifest.job)]
    written = manifest.job.get("model", {}).get("tokenizer_path")
    return Loaded(model, [*([written] if written else []), *named])


def _without_mtp(model: HFModel) -> HFModel:
    return HFModel(model.family, replace(model.config, num_mtp_layers=0))


def _empty(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config)
    for parameter in model.parameters():  # Buffers keep their own types.
        parameter.data = parameter.data.to(dtype)
    move_off_meta(model, device, parameter_device=device)
    return model.eval()
