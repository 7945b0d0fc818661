"""A config.json beside the one that its weights came from: which of that one's keys it keeps."""

from collections.abc import Collection, Mapping
from typing import Any

# Keys of rope_scaling and rope_parameters that are read into a RopeConfig, or refused.
_ROPE = {
    "rope_theta",
    "rope_type",
    "type",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
}


def text_of(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text model: `text_config`, or all of it."""
    return settings.get("text_config") or settings


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
    kept = {name: value for name, value in (original.get(key) or {}).items() if name not in _ROPE}
    if "rope_theta" not in ours or not kept:
        return {}
    table = kept | (ours.get("rope_scaling") or {"rope_type": "default"})
    if key == "rope_parameters":
        names = ("rope_theta", "partial_rotary_factor")
        table |= {name: ours[name] for name in names if name in ours}
        # transformers would read rope_scaling in place of it.
        return {key: table, "rope_scaling": None}
    return {key: table}
