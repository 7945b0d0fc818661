"""Copies the files beside the weights: config.json, and those of tokenizer and generation."""

import json
import logging
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from filecmp import cmpfiles
from pathlib import Path
from typing import Any

import torch

from titan_moe.checkpoint.digests import MANIFEST
from titan_moe.checkpoint.hf.folder import INDEX, PUBLISHED_INDEX
from titan_moe.config.errors import ConfigError
from titan_moe.models.hf import CONFIG, HFModel, differences, model_of, read_settings
from titan_moe.models.hf_settings import TEMPLATES, TextFormat, chat_templates, kept_keys, text_of

HF = "hf"
"""Folder of a checkpoint that holds the files that came along with imported weights."""

logger = logging.getLogger(__name__)

_KEPT = ("*.json", "*.model", "*.tiktoken", "tokenizer.model.*", "*.txt", "*.jinja")
_LEFT_OUT = ("*.index.json", CONFIG, "LICENSE*", "requirements*.txt")
TYPE_KEYS = ("dtype", "torch_dtype")
"""Keys of a config.json that name the type of the weights."""
# Keys of an original config.json that no longer hold; rope_parameters is written anew.
OUTDATED = {
    "quantization_config",
    *TYPE_KEYS,
    "rope_parameters",
    "_name_or_path",
}
EOS = "eos_token_id"
ENDS = ("bos_token_id", EOS, "pad_token_id")
_GENERATION, _TOKENIZER = "generation_config.json", "tokenizer_config.json"
# Files that may have a chat template inside, or name the token that ends a text.
_NAMING = (_TOKENIZER, "special_tokens_map.json", "chat_template.json", "processor_config.json")
_KINDS = ("model_type", "architectures")
CODE = "auto_map"


def asset_folders(checkpoint: Path, job_record: Mapping[str, Any]) -> list[Path]:
    """Returns the folders that have a config.json, tokenizer files or the like, the likeliest
    first: the checkpoint's own, those that its job took model and tokenizer from, and those of the
    checkpoints before that it started from."""
    folders: list[Path] = []
    seen: list[Path] = []
    while checkpoint not in seen:
        seen.append(checkpoint)
        model = job_record.get("model", {})
        initial = job_record.get("checkpoint", {}).get("initial_load_path")
        named = [model.get("hf_assets_path"), initial, model.get("tokenizer_path")]
        folders.append(checkpoint / HF)
        for path in map(Path, filter(None, named)):
            place = path.parent if path.is_file() else path
            folders += [place / HF, place]
        checkpoint = Path(initial or checkpoint)
        job_record = _read(checkpoint / MANIFEST).get("job") or {}
    # A checkpoint's own JSON files are none of these.
    others = [folder for folder in folders if not (folder / MANIFEST).exists()]
    return [folder for folder in others if (folder / CONFIG).is_file() or _files(folder)]


def copy_assets(source: Path, target: Path) -> None:
    """Copy config.json, all files about the tokenizer and generation, and the weights' index."""
    target.mkdir(parents=True, exist_ok=True)
    for path in [*_files(source), *(path for path in [source / CONFIG] if path.is_file())]:
        shutil.copyfile(path, target / path.name)
    if (source / INDEX).is_file():
        shutil.copyfile(source / INDEX, target / PUBLISHED_INDEX)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, target / TEMPLATES, dirs_exist_ok=True)


def origin_of(model: HFModel, folders: Sequence[Path]) -> Path | None:
    """The first folder whose config.json has a model's dimensions, but for positions."""
    for folder in folders:
        try:
            original = model_of(folder)
        except ConfigError:
            continue
        lines = differences(model.config, original.config)
        if original.family == model.family and all(line.startswith("rope.") for line in lines):
            return folder
    return None


def write_assets(
    model: HFModel,
    origin: Path | None,
    folders: Sequence[Path],
    texts: TextFormat,
    dtype: torch.dtype,
    target: Path,
    tokenizer: str | None = None,
) -> bool:
    """Give an export its config.json and the files of the first of `folders` that has any; returns
    whether it keeps the tokens that begin and end a text of the weights' folder.

    All keys of the origin's config.json are kept that do not follow from the dimensions. The tokens
    that begin and end a text are the origin's, else those that were trained. A model that was
    trained with another tokenizer than the one there gets that one's files and tokens. The chat
    template is the one that was trained, and what ends its turns ends a text too.

    Args:
        origin: as `origin_of` finds it.
        tokenizer: the run's model.tokenizer_path, where it is known.
    """
    files = next(filter(None, map(_files, folders)), [])
    if (others := _other_files(tokenizer, files)) is not None:
        files = others
    if not files:
        logger.warning("no tokenizer files are at hand: add them beside %s", CONFIG)
    for path in files:
        shutil.copyfile(path, target / path.name)
    original = {} if origin is None else read_settings(origin)
    text = text_of(original)
    generation = {} if origin is None else _read(origin / _GENERATION)
    ends = _ends_of_texts((text, original, generation) if others is None else (), texts)
    settings = kept_keys(model.settings(), text, OUTDATED) | _typed(text, dtype) | ends
    if model.wrapper is not None:
        own = {key: text[key] for key in _KINDS if key in text}
        inside = {key: value for key, value in settings.items() if key not in _KINDS} | own
        kept = {key: value for key, value in original.items() if key not in OUTDATED}
        if kept.get(EOS) is not None:
            kept[EOS] = with_ids(kept[EOS], texts.turn_ends.values())
        settings = kept | _typed(original, dtype) | {"text_config": inside}
    if missing := (_code(settings) | _named_code(files)) - {path.name for path in files}:
        lost = ", ".join(sorted(missing))
        logger.warning("%s: %s names files that were not there: %s", target, CODE, lost)
    if missing & _code(settings):
        settings.pop(CODE)
    (target / CONFIG).write_text(json.dumps(settings, indent=2))
    written = _chat_files(target, texts, ends, files[0].parent) if files else {}
    for name, content in written.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(content.encode())
    return others is None


def _chat_files(
    target: Path, texts: TextFormat, ends: Mapping[str, Any], source: Path
) -> dict[str, str]:
    """Returns the files of a folder that a trained chat template changes, by name, and their text.

    Tokenizers of transformers prefer chat_template.jinja to what JSON files have inside, processors
    do not: all of them get the template. A template that writes eos_token itself keeps that token.
    Other templates with names, such as tool_use, stay only if that of `source` was trained.
    """
    if texts.template is None:
        return {}
    made = {"chat_template.jinja": texts.template}
    named = chat_templates(source, _read(source / _TOKENIZER).get("chat_template"))
    if named.pop("default", None) == texts.template:
        made |= {f"{TEMPLATES}/{name}.jinja": text for name, text in named.items()}
    for name in (*_NAMING, _GENERATION):
        before = _read(target / name)
        table = before | {key: texts.template for key in ("chat_template",) if key in before}
        names_eos = "eos_token" in table or name == _TOKENIZER
        if texts.turn_ends and names_eos and "eos_token" not in texts.template:
            table["eos_token"] = next(iter(texts.turn_ends))
        if texts.turn_ends and name == _GENERATION:
            table = table or {key: value for key, value in ends.items() if value is not None}
            table[EOS] = with_ids(table.get(EOS, ends[EOS]), texts.turn_ends.values())
        if table != before:
            made[name] = json.dumps(table, indent=2, ensure_ascii=False)
    return made


def with_ids(known: Any, ids: Collection[int]) -> Any:
    """Returns the value of an eos_token_id that has these ids too."""
    before = known if isinstance(known, list) else [known] if known is not None else []
    return known if set(ids) <= set(before) else list(dict.fromkeys([*ids, *before]))


def _typed(original: Mapping[str, Any], dtype: torch.dtype) -> dict[str, str]:
    """The type of the weights, under the key that the original has for it."""
    key = next((key for key in TYPE_KEYS if key in original), TYPE_KEYS[-1])
    return {key: str(dtype).removeprefix("torch.")}


def _ends_of_texts(tables: Sequence[Mapping[str, Any]], texts: TextFormat) -> dict[str, Any]:
    """The tokens that begin, end and pad a text: by the first table that has each, or where none
    has an end, those that were trained; and those that end a turn."""
    if all(table.get(EOS) is None for table in tables):
        tables = [*tables, texts.ends]
    found: dict[str, Any] = dict.fromkeys(ENDS)
    for table in reversed(tables):
        found |= {key: table[key] for key in ENDS if table.get(key) is not None}
    found[EOS] = with_ids(found[EOS], texts.turn_ends.values())
    if found[EOS] is None:
        logger.warning("no eos_token_id is known: add it to %s, or no text ends", CONFIG)
    return found


def _code(settings: Mapping[str, Any]) -> set[str]:
    """Returns the Python files that auto_map names, not another repository's
    (`name--file.Class`)."""
    named = settings.get(CODE)
    lists = named.values() if isinstance(named, dict) else [named]  # An old form is a list.
    names = [name for each in lists for name in (each if isinstance(each, list) else [each])]
    classes = [name for name in names if isinstance(name, str) and "--" not in name]
    return {f"{name.rpartition('.')[0]}.py" for name in classes}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _files(folder: Path) -> list[Path]:
    """Files beside the weights, with the Python files if a JSON file names one."""
    left_out = {path for pattern in _LEFT_OUT for path in folder.glob(pattern)}
    found = {path for pattern in _KEPT for path in folder.glob(pattern) if path.is_file()}
    if _named_code([*found, folder / CONFIG]):
        found |= set(folder.glob("*.py"))
    return sorted(found - left_out)


def _other_files(tokenizer: str | None, files: Sequence[Path]) -> list[Path] | None:
    """Files of a model.tokenizer_path, unless they are unknown, or the same as those of their names
    among `files`."""
    path = Path(tokenizer or "")
    own = _files(path.parent if path.is_file() else path) if tokenizer else []
    if not own or not files:
        return own or ([] if tokenizer == "bytes" else None)
    names = [path.name for path in own]
    same, different, _ = cmpfiles(own[0].parent, files[0].parent, names, shallow=False)
    return None if same and not different else own


def _named_code(paths: Iterable[Path]) -> set[str]:
    tables = [_read(path) for path in paths if path.name.endswith("config.json")]
    return {name for table in tables for name in _code(table) | _code(text_of(table))}
