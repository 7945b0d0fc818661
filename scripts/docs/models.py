"""The tables of docs/models.md: every flavor's dimensions and parameters, by arithmetic."""

import inspect
import re
import sys
from pathlib import Path

from titan_moe.models.config import AttentionConfig, GQAConfig, MLAConfig, ModelConfig
from titan_moe.models.registry import FAMILIES, family_module, flavors
from titan_moe.models.stats import total

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPO = Path(__file__).parents[2]
_HEADS = (
    *("flavor", "parameters", "active", "layers", "width", "attention", "experts"),
    "files in `configs/`",
)
_ADDRESS = re.compile(r"arXiv ((?:\d{4}\.\d{5}(?:, | and )?)+)")

_REPOSITORY = re.compile(
    r"(?:deepseek-ai|MiniMaxAI|mistralai|moonshotai|openai|Qwen|zai-org)/[\w.-]+\w"
)


def tables() -> str:
    """Returns a heading and a table for each family, without those for tests, named gate."""
    files = _files()
    parts = []
    for family in FAMILIES:
        says = (inspect.getdoc(family_module(family)) or "").split("\n\n")[0]
        rows = [
            "| " + " | ".join(_row(flavor, config, files.get((family, flavor), []))) + " |"
            for flavor, config in sorted(
                flavors(family).items(), key=lambda one: sum(total(one[1]))
            )
            if not flavor.startswith("gate")
        ]
        head = f"| {' | '.join(_HEADS)} |\n|---|{'--:|' * 2}{'---|' * (len(_HEADS) - 3)}"
        parts.append(f"## {family} {{#{family}}}\n\n{_linked(says)}\n\n" + "\n".join([head, *rows]))
    return "\n\n".join(parts)


def _row(flavor: str, config: ModelConfig, files: list[str]) -> list[str]:
    size = total(config)
    moe = config.moe
    experts = "none: dense"
    if moe is not None:
        shared = f" + {moe.num_shared_experts} shared" if moe.num_shared_experts else ""
        experts = f"{moe.top_k} of {moe.num_experts}{shared}, {moe.hidden_dim:,} wide"
        experts += f", latent {moe.latent_dim:,}" if moe.latent_dim else ""
    return [
        f"`{flavor}`",
        _count(sum(size)),
        _count(size.active(config)),
        _layers(config),
        f"{config.dim:,}",
        _attention(config),
        experts,
        ", ".join(f"`{name}`" for name in files),
    ]


def _count(number: float) -> str:
    """Returns a number of parameters with three digits."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e3:.3g} k"


def _layers(config: ModelConfig) -> str:
    dense = sum(map(config.is_dense_layer, range(config.num_layers)))
    words = str(config.num_layers)
    if config.moe is not None and 0 < dense < config.num_layers:
        words += f", {dense} dense"
    words += ", a dense part in each" * config.dense_beside_experts
    if config.num_mtp_layers:
        words += f", {config.num_mtp_layers} MTP"
    return words


def _attention(config: ModelConfig) -> str:
    attention = config.attention
    words = f"{type(attention).__name__.removesuffix('Config')}, {attention.num_heads} heads"
    if isinstance(attention, GQAConfig):
        words = f"GQA {attention.num_heads}/{attention.num_kv_heads} x {attention.head_dim}"
        if 0 < attention.rope_dim < attention.head_dim:
            words += f", {attention.rope_dim} rotate"
    elif isinstance(attention, MLAConfig):
        channels = f"{attention.nope_dim}+{attention.rope_dim}"
        words = f"MLA {attention.num_heads} x {channels}, latent {attention.kv_rank}"
        if indexer := attention.indexer:
            words += f", {indexer.top_k:,} keys by {indexer.num_heads} x {indexer.head_dim}"
    if recurrent := config.recurrent:
        state = f"{recurrent.key_dim}x{recurrent.value_dim}"
        mixers = map(config.mixer, range(config.num_layers))
        attending = sum(mixer is config.attention for mixer in mixers)
        words += f" in {attending} layers, {recurrent.num_value_heads} states {state}"
    if config.near is not None and (local := config.near.local) is not None:
        words += f", {local.kind} {local.size:,}"
        near = config.near
        if isinstance(near, GQAConfig) and _heads(near) != _heads(attention):
            words += f" by {_heads(near)}"
    return words + (", sinks" if any(each.sinks for each in config.attentions) else "")


def _heads(attention: AttentionConfig) -> str:
    return f"{attention.num_heads}/{attention.num_kv_heads} x {attention.qk_dim}"


def _files() -> dict[tuple[str, str], list[str]]:
    """Returns the TOML files of each family and flavor, below configs/."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted((REPO / "configs").glob("*/*.toml")):
        model = tomllib.loads(path.read_text(encoding="utf-8")).get("model", {})
        if "name" in model and "flavor" in model:
            name = path.relative_to(REPO / "configs").as_posix()
            found.setdefault((model["name"], model["flavor"]), []).append(name)
    return found


def _linked(text: str) -> str:
    """Returns a docstring with its papers and Hugging Face repositories as links."""
    text = _ADDRESS.sub(
        lambda found: (
            "arXiv " + re.sub(r"\d{4}\.\d{5}", r"[\g<0>](https://arxiv.org/abs/\g<0>)", found[1])
        ),
        text,
    )
    return _REPOSITORY.sub(r"[\g<0>](https://huggingface.co/\g<0>)", text)
