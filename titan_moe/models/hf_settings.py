"""Published models around a text model, how a model's texts are written, and keys that a
config.json keeps of an earlier one."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from titan_moe.models.config import Llama3Scaling, YarnScaling
from titan_moe.models.hf_names import HFWeight

TEMPLATES = "additional_chat_templates"
"""Folder beside chat_template.jinja of the templates that have names, such as tool_use."""
# Keys of rope_scaling and rope_parameters that are read into a RopeConfig, or refused.
ROPE = {
    "rope_theta",
    "rope_type",
    "type",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "attention_factor",
    *(field.name for scaling in (YarnScaling, Llama3Scaling) for field in fields(scaling)),
}


@dataclass(frozen=True)
class TextFormat:
    """The tokens around the texts that a model was trained on, and its chat template."""

    ends: dict[str, int] = field(default_factory=dict)
    """Ids that begin, end and pad a text, by the keys of config.json."""
    template: str | None = None
    """The chat template in Jinja; None if no conversations were trained."""
    turn_ends: dict[str, int] = field(default_factory=dict)
    """Ids of the tokens that end the assistant's turns, by name, that of a plain answer first."""


@dataclass(frozen=True)
class Wrapper:
    """A published model whose text model is one of ours, and trains alone."""

    prefix: str
    """Stands before the text model's names, which lose `without`."""
    rest: tuple[str, ...]
    """Patterns (fnmatch) of tensors that are not trained."""
    without: str = ""
    transposed: bool = False
    """Stacks of experts are published with their last two dims swapped, which their shape tells."""
    tied_by: tuple[str, ...] = ("whole",)
    """Tables in which transformers (5.24) looks for tie_word_embeddings: the whole config.json, the
    text_config in it."""
    tied: bool = False
    """Tied where these tables do not say."""

    def name(self, plain: str) -> str:
        """The name of one of the text model's tensors."""
        inside = plain.startswith(self.without)
        return self.prefix + plain.removeprefix(self.without) if inside else plain

    def ways(self, plain: tuple[HFWeight, ...]) -> tuple[HFWeight, ...]:
        """The ways in which a tensor may be stored, those of the text model alone last."""
        named = [replace(way, name=self.name(way.name)) for way in plain]
        stacks = [way for way in named if way.name.endswith(_STACKS) and self.transposed]
        return *named, *(replace(way, transposed=True) for way in stacks), *plain


_STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_QWEN = Wrapper("model.language_model.", ("model.visual.*",), without="model.")
WRAPPERS = {
    "gemma4": Wrapper(
        "model.language_model.",
        ("model.*_tower.*", "model.embed_vision.*", "model.embed_audio.*"),
        without="model.",
        tied=True,
    ),
    "glm4v_moe": replace(_QWEN, tied_by=("whole", "text")),
    "kimi_k25": Wrapper("language_model.", ("*vision_tower.*", "*mm_projector.*"), tied=True),
    "llama4": Wrapper(
        "language_model.", ("vision_model.*", "multi_modal_projector.*"), tied_by=("text",)
    ),
    "qwen3_5_moe": _QWEN,
    # Its layers after the 45th predict further tokens.
    "step3p7": Wrapper("", ("vision_model.*", "vit_large_projector.*", "model.layers.4[567].*")),
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": replace(_QWEN, transposed=True),
}
"""Prefixes and names of the language model's weights, by the model_type of a whole config.json."""


def chat_templates(folder: Path | None, inside: Any) -> dict[str, str]:
    """Returns the chat templates of a folder by their names, as transformers finds them: those in
    files of their own, else `inside`, tokenizer_config.json's: a text, or several with names."""
    if folder is not None and (file := folder / "chat_template.jinja").is_file():
        files = {"default": file} | {
            each.stem: each for each in folder.glob(f"{TEMPLATES}/*.jinja")
        }
        return {name: each.read_bytes().decode(errors="replace") for name, each in files.items()}
    several = inside if isinstance(inside, list) else [{"name": "default", "template": inside}]
    found = ((each.get("name"), each.get("template")) for each in several if isinstance(each, dict))
    return {str(name): text for name, text in found if isinstance(text, str)}


def text_of(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text model: `text_config`, or all of it."""
    text, key = settings.get("text_config"), "tie_word_embeddings"
    if not isinstance(text, dict) or not text:
        return settings
    tables = {"whole": settings, "text": text}
    wrapper = WRAPPERS.get(settings.get("model_type", ""), _QWEN)
    said = [tables[name][key] for name in wrapper.tied_by if tables[name].get(key) is not None]
    return {**text, key: next(filter(None, said or [wrapper.tied]), False)}


def kept_keys(
    ours: Mapping[str, Any], original: Mapping[str, Any], outdated: Collection[str]
) -> dict[str, Any]:
    """Returns `ours` and all keys of `original` that it lacks, at every depth.

    Args:
        outdated: keys of the original's first level that are left out.
    """
    tables = {
        key: kept_keys(value, original[key], ())
        for key, value in ours.items()
        if isinstance(value, dict) and isinstance(original.get(key), dict) and key != "rope_scaling"
    }
    kept = {key: value for key, value in original.items() if key not in outdated}
    return {**kept, **ours, **tables, **_rope(ours, original)}


def _rope(ours: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions where the original has them, with its keys that have no place in ours, such
    as mrope_section."""
    key = "rope_parameters" if original.get("rope_parameters") else "rope_scaling"
    kept = {name: value for name, value in (original.get(key) or {}).items() if name not in ROPE}
    if "rope_theta" not in ours or not (kept or original.get("rope_parameters")):
        return {}
    table = kept | (ours.get("rope_scaling") or {"rope_type": "default"})
    if key == "rope_parameters":
        names = ("rope_theta", "partial_rotary_factor")
        table |= {name: ours[name] for name in names if name in ours}
        # transformers would read rope_scaling in place of it.
        return {key: table, "rope_scaling": None}
    return {key: table}
