"""Models as Hugging Face folders describe them: config.json, weights' names, and what differs.

No torch. `hf_family.py` says what a family's `hf.py` has.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Model
from titan_moe.config.parse import flat_keys
from titan_moe.models.config import ModelConfig, tied_weights
from titan_moe.models.hf_names import HFKeys
from titan_moe.models.hf_settings import WRAPPERS, Wrapper, text_of
from titan_moe.models.registry import FAMILIES, family_module, flavors, model_config

CONFIG = "config.json"
_METHODS = ("fp8", "mxfp4")
# Keys that are read before a family is known, at both depths.
_KINDS = {
    "model_type": str,
    "text_config": dict,
    "quantization_config": dict,
    "rope_parameters": dict,
    "rope_scaling": dict,
}

# A run chooses these for its training, its length of sequences or the names in an exported folder:
# weights fit all the same.
_OF_TRAINING = {
    "init_std",
    "max_seq_len",
    "num_mtp_layers",
    "mtp_loss_weight",
    "attention.indexer.warm_up",
    "recurrent.files_join_heads",
    "moe.row_alignment",
    "moe.bias_update",
    "moe.bias_momentum",
    "moe.bias_update_speed",
    "moe.sequence_aux_loss_weight",
    "moe.global_aux_loss_weight",
    "moe.z_loss_weight",
    "moe.force_load_balance",
}
_ADAPTER = TypeAdapter(ModelConfig)


@dataclass(frozen=True)
class HFModel:
    """A model of a family, as Hugging Face sees it."""

    family: str
    config: ModelConfig
    wrapper: Wrapper | None = None
    """The published model that it is the text model of."""

    @cached_property
    def keys(self) -> HFKeys:
        """Our names -> the ways in which each may be stored."""
        keys: HFKeys = family_module(self.family).keys(self.config)
        if self.wrapper is None:
            return keys
        return {name: self.wrapper.ways(ways) for name, ways in keys.items()}

    @property
    def copies(self) -> dict[str, str]:
        """Maps Hugging Face's names of tensors that are published in multi-token prediction layers
        as copies to our names of what they copy. They may be missing on import, and are not read.
        """
        first, found = self.config.num_layers, {}
        for ours in ("tok_embeddings.weight", "output.weight"):
            for way in self.keys.get(f"mtp.layers.{{layer}}.{ours}", ())[:1]:
                for layer in range(first, first + self.config.num_mtp_layers):
                    name = way.name.replace("{layer}", str(layer))
                    found[name] = self.first_of_group.get(ours, ours)
        return found

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns (fnmatch) of their tensors that have no place here, or none in this model:
        angles, which are computed, multi-token prediction that is left out, and the wrapper's."""
        ahead = () if self.config.num_mtp_layers else ("mtp.*", "model.mtp.*")
        around = () if self.wrapper is None else self.wrapper.rest
        return "*.rotary_emb.inv_freq", *ahead, *around

    @cached_property
    def first_of_group(self) -> dict[str, str]:
        """Maps each copy of a tied weight to the parameter that it copies."""
        return {copy: first for first, *others in tied_weights(self.config) for copy in others}

    @cached_property
    def tied(self) -> dict[str, str]:
        """Maps Hugging Face's names of tied weights to our names of what they copy. They may be
        there on import, and are not written."""
        copies = self.first_of_group.items()
        return {way.name: first for copy, first in copies for way in self.keys.get(copy, ())}

    def settings(self) -> dict[str, Any]:
        """Returns its config.json, in the published form.

        Raises ConfigError when the family's published code has no place for something of it.
        """
        module = family_module(self.family)
        settings = module.to_hf(self.config)
        try:
            lines = differences(self.config, module.from_hf(settings))
        except ConfigError as error:
            lines = [line.removeprefix(f"{CONFIG}: ") for line in error.lines]
        if lines:
            raise ConfigError(
                f"the Hugging Face form of {self.family} has no place for {'; '.join(lines)}"
            )
        return settings


def model_of_job(section: Model) -> ModelConfig:
    """The dimensions that a [model] table asks for. Raises ConfigError."""
    named = section.flavor != "hf"
    config = model_config(section.name, section.flavor) if named else _config_of_folder(section)
    depths = section.num_mtp_layers
    return config if depths is None else replace(config, num_mtp_layers=depths)


def _config_of_folder(section: Model) -> ModelConfig:
    flavors(section.name)  # Refuses a name that is no family.
    if section.hf_assets_path is None:
        raise ConfigError("model.flavor='hf' needs model.hf_assets_path, a Hugging Face folder")
    found = model_of(Path(section.hf_assets_path))
    if found.family != section.name:
        raise ConfigError(
            f"model.name={section.name!r}: model.hf_assets_path={section.hf_assets_path} holds "
            f"a model of the family {found.family!r}: set that"
        )
    return found.config


def export_problems(model: HFModel, bias_update_speed: float | None) -> list[str]:
    """Returns the reasons why the trained model could not be exported; empty if it could.

    Args:
        bias_update_speed: the [moe] table's; None: the flavor's own.
    """
    try:
        model.settings()
    except ConfigError as error:
        return error.lines
    depths = model.config.num_mtp_layers
    if depths and not any(name.startswith("mtp.") for name in model.keys):
        return [
            f"checkpoint.last_save_in_hf=true: the Hugging Face form of {model.family} has no "
            f"place for model.num_mtp_layers={depths}: choose 0"
        ]
    moe = model.config.moe
    if moe is None or any(name.endswith("router.expert_bias") for name in model.keys):
        return []
    speed = moe.bias_update_speed if bias_update_speed is None else bias_update_speed
    rule = f"moe.bias_update_speed={speed}: choose 0" if speed else ""
    if moe.bias_update == "quantile":
        rule = "moe.bias_update=quantile: choose sign, and moe.bias_update_speed=0"
    if not rule:
        return []
    return [
        f"checkpoint.last_save_in_hf=true: the Hugging Face form of {model.family} with "
        f"{moe.score} scores has no place for the routing bias of {rule}"
    ]


def read_settings(folder: Path) -> dict[str, Any]:
    """Returns config.json of a folder. Raises ConfigError in one line."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise ConfigError(f"{folder} does not exist, or is no folder")
    try:
        settings = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no {CONFIG}: name a Hugging Face folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds no JSON object")
    text = settings.get("text_config")
    for table in (settings, text if isinstance(text, dict) else {}):
        for key, kind in _KINDS.items():
            if not isinstance(table.get(key), kind | None):
                says = "a string" if kind is str else "a JSON object"
                raise ConfigError(f"{path}: {key}={table[key]!r} must be {says}")
    return settings


def weight_block(settings: Mapping[str, Any], path: Path) -> tuple[int, int] | None:
    """Returns the block size of float8 weights, None without any. Raises ConfigError for weights
    that cannot be de-quantised.

    Args:
        path: of the config.json.
    """
    quantized = quantization(settings)
    method = quantized.get("quant_method")
    if quantized and method not in _METHODS and not _is_packed_int4(quantized):
        raise ConfigError(
            f"{path}: quantization_config.quant_method={method!r} cannot be de-quantised here, "
            f"only {', '.join(map(repr, _METHODS))} or symmetric 4-bit integers in the format "
            "pack-quantized: name unquantised weights"
        )
    block = quantized.get("weight_block_size")
    if block is None:
        return None
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(f"{path}: weight_block_size={block!r} must be two sizes")
    return int(block[0]), int(block[1])


def _is_packed_int4(quantized: Mapping[str, Any]) -> bool:
    wanted = {"num_bits": 4, "type": "int", "symmetric": True}
    try:
        kinds = [group["weights"].items() for group in quantized["config_groups"].values()]
    except (KeyError, TypeError, AttributeError):
        return False
    fitting = all(kind >= wanted.items() for kind in kinds)
    return quantized.get("format") == "pack-quantized" and fitting


def quantization(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantization_config of a config.json, also inside a text_config; empty without."""
    found = settings.get("quantization_config") or text_of(settings).get("quantization_config")
    return found or {}


def model_of(folder: Path) -> HFModel:
    """Family and dimensions by a folder's config.json. Raises ConfigError in one line each.

    Multi-token prediction layers count as far as the folder has their weights: config.json may
    name some that were left out.
    """
    settings = read_settings(folder)
    family = family_of(settings, folder / CONFIG)
    try:
        config = family_module(family).from_hf(text_of(settings))
        numbers = [
            (k, v) for k, v in flat_keys(asdict(config)).items() if isinstance(v, int | float)
        ]
        if wrong := [f"{key}={value}" for key, value in numbers if not 0 <= value < math.inf]:
            raise ValueError(f"{', '.join(wrong)} must be 0 or more, and finite")
        model = HFModel(family, config, wrapper_of(settings))
        return replace(model, config=replace(config, num_mtp_layers=_mtp_layers(folder, model)))
    except ConfigError as error:
        lines = [line.replace(CONFIG, str(folder / CONFIG), 1) for line in error.lines]
        raise ConfigError(lines) from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise ConfigError(f"{folder / CONFIG} makes no sense: {error}") from None


def _mtp_layers(folder: Path, model: HFModel) -> int:
    """Returns how many multi-token prediction layers of config.json have weights. Returns all if
    the list of weights cannot be read: reading them raises the error."""
    names, config = _tensor_names(folder), model.config
    if not names:
        return config.num_mtp_layers
    ways = [way for ours, all_ways in model.keys.items() if "mtp." in ours for way in all_ways]
    layers = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    return sum(
        any(way.name.replace("{layer}", str(layer)) in names for way in ways) for layer in layers
    )


def _tensor_names(folder: Path) -> set[str]:
    try:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            return set(json.loads(index.read_bytes())["weight_map"])
        with safe_open(folder / "model.safetensors", "np") as file:
            return set(file.keys())
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return set()


def family_of(settings: dict[str, Any], path: Path) -> str:
    """The family that a config.json's model_type belongs to. Raises ConfigError for others."""
    known = {
        model_type: family
        for family in FAMILIES
        for model_type in family_module(family).MODEL_TYPES
    }
    table = settings if wrapper_of(settings) is None else text_of(settings)
    wanted = table.get("model_type")
    if wanted not in known:
        only = ", ".join(sorted(known | WRAPPERS))
        raise ConfigError(f"{path}: model_type={wanted!r} is not supported: only {only}")
    return known[wanted]


def wrapper_of(settings: Mapping[str, Any]) -> Wrapper | None:
    """The published model around the text model that a config.json describes."""
    return WRAPPERS.get(settings.get("model_type", "")) if settings.get("text_config") else None


def differences(ours: ModelConfig, theirs: ModelConfig) -> list[str]:
    """Dimensions that are not the same, as "dim 256 (there 512)"; training's own do not count."""
    layers = min(ours.num_layers, theirs.num_layers)
    mine, other = (flat_keys(_in_layers(config, layers)) for config in (ours, theirs))
    unread = set(_OF_TRAINING)
    if not ours.has_dense:
        unread.add("hidden_dim")
    if ours.moe is not None and ours.moe.num_groups == 1:
        unread |= {"moe.group_score_top", "moe.top_groups"}
    return [
        f"{key} {mine.get(key)} (there {other.get(key)})"
        for key in sorted(mine.keys() | other.keys())
        if key not in unread and mine.get(key) != other.get(key)
    ]


def _in_layers(config: ModelConfig, num_layers: int) -> dict[str, Any]:
    """Returns the record of a model, of its layers the first ones alone."""
    record = asdict(config)
    for key in ("pattern", "ffn_pattern"):
        record[key] = (record[key] * num_layers)[:num_layers]
    for table in (record, record["moe"] or {}):
        if table and (limited := table["activation"]["limited_in"]) is not None:
            table["activation"]["limited_in"] = [n for n in limited if n < num_layers]
    return record


def as_record(config: ModelConfig) -> dict[str, Any]:
    """A model's dimensions as JSON can hold them."""
    return asdict(config)


def from_record(record: dict[str, Any]) -> ModelConfig:
    """The dimensions that `as_record` made a record of. Raises ValueError."""
    return _ADAPTER.validate_python(record)
