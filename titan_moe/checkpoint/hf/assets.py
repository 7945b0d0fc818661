"""Copies the files beside the weights: config.json, and those of tokenizer and generation."""

import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from titan_moe.checkpoint.folder import write_json
from titan_moe.config.errors import ConfigError
from titan_moe.models.hf import CONFIG, HFModel, family_of, read_settings

HF = "hf"
"""Folder of a checkpoint that holds the files that came along with imported weights."""

logger = logging.getLogger(__name__)

_KEPT = ("*.json", "*.model", "*.txt", "*.jinja")
_LEFT_OUT = ("*.index.json", CONFIG, "LICENSE*", "requirements*.txt")
# Keys of an original config.json that no longer hold.
_OUTDATED = {
    "quantization_config",
    "torch_dtype",
    "dtype",
    "auto_map",
    "rope_parameters",
    "_name_or_path",
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def asset_folders(checkpoint: Path, job_record: Mapping[str, Any]) -> list[Path]:
    """Returns the folders that have tokenizer files or the like, the likeliest first: the
    checkpoint's own, then those that its job took model and tokenizer from."""
    model, kept = job_record.get("model", {}), job_record.get("checkpoint", {})
    named = [
        model.get("hf_assets_path"),
        kept.get("initial_load_path"),
        model.get("tokenizer_path"),
    ]
    folders = [checkpoint / HF]
    for path in (Path(name).expanduser() for name in named if name):
        place = path.parent if path.name == "tokenizer.json" else path
        folders += [place / HF, place]
    return [folder for folder in folders if folder.is_dir() and _files(folder)]


def copy_assets(source: Path, target: Path) -> None:
    """Copy config.json and all files about the tokenizer and generation."""
    target.mkdir(parents=True, exist_ok=True)
    for path in [*_files(source), *(path for path in [source / CONFIG] if path.is_file())]:
        shutil.copyfile(path, target / path.name)


def write_assets(model: HFModel, folders: Iterable[Path], dtype: torch.dtype, target: Path) -> None:
    """Give an export its config.json and the files of the first of `folders` that has any.

    Keys of an original config.json of the same kind that do not follow from dimensions are kept.
    """
    folders = list(folders)
    if not folders:
        logger.warning("no tokenizer files are at hand: add them beside config.json")
    for path in _files(folders[0]) if folders else []:
        shutil.copyfile(path, target / path.name)
    settings = model.settings() | {"torch_dtype": str(dtype).removeprefix("torch.")}
    original = next(filter(None, (_original(model, folder) for folder in folders)), {})
    if original.get("model_type") == settings["model_type"]:
        extra = {key: value for key, value in original.items() if key not in _OUTDATED}
    else:
        extra = {}
    # Left out, transformers would take its own for the family's first model.
    tokens = {key: original.get(key) for key in _TOKENS}
    write_json(target / CONFIG, extra | tokens | settings, indent=2)


def _original(model: HFModel, folder: Path) -> dict[str, Any]:
    try:
        settings = read_settings(folder)
        return settings if family_of(settings, folder) == model.family else {}
    except ConfigError:
        return {}


def _files(folder: Path) -> list[Path]:
    left_out = {path for pattern in _LEFT_OUT for path in folder.glob(pattern)}
    found = {path for pattern in _KEPT for path in folder.glob(pattern) if path.is_file()}
    return sorted(found - left_out)
