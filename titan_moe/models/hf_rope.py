"""Reads the rotary positions of a config.json: published models have `rope_theta` and
`rope_scaling`, and what transformers 5 writes has `rope_parameters`."""

from collections.abc import Mapping
from typing import Any, Literal

from titan_moe.config.errors import ConfigError
from titan_moe.models import hf_family as hf
from titan_moe.models.config import RopeConfig


def rope_from_hf(
    settings: hf.Settings,
    pairing: Literal["halves", "neighbours"] = "halves",
    *,
    latent: bool = False,
    partial: bool = False,
) -> RopeConfig:
    """Rotary positions. Raises ConfigError for a scaling that is not known.

    Args:
        latent: DeepSeek's attention, whose softmax scale knows YaRN's mscale_all_dim. Elsewhere
            YaRN as transformers has it: cosines and sines alone are scaled.
        partial: the family reads `partial_rotary_factor`. In others transformers reads it too, but
            only where positions are scaled.
    """
    parameters = _rope_table(settings)
    if layers := [key for key, value in parameters.items() if isinstance(value, Mapping)]:
        raise ConfigError(
            f"config.json: rotary positions by kind of layer ({', '.join(layers)}) are not "
            "supported: only one table for all layers"
        )
    theta = float(of_rope(settings, "rope_theta", 10_000.0))
    kind = hf.given(parameters, "rope_type", hf.given(parameters, "type", "default"))
    if kind == "default":
        return RopeConfig(theta, pairing)
    hf.only({"rope_type": kind}, rope_type=tuple(hf.SCALINGS))
    if not partial:
        factor = of_rope(settings, "partial_rotary_factor", 1.0)
        hf.only({"partial_rotary_factor": factor}, partial_rotary_factor=(1.0,))
    scaling, names = hf.SCALINGS[kind]
    hf.needed(parameters, "factor")
    numbers = {name: float(parameters[name]) for name in names if parameters.get(name) is not None}
    more = _yarn(parameters, latent=latent) if kind == "yarn" else {}
    longest = hf.given(parameters, hf.ORIGINAL, settings.get("max_position_embeddings"))
    original = hf.given(settings, hf.ORIGINAL, longest)
    return RopeConfig(
        theta, pairing, scaling(original_max_seq_len=int(original), **numbers, **more)
    )


def partial_rotary_factor(settings: hf.Settings, head_dim: int, default: float) -> float:
    """The share of a head's channels that rotate, by either form of config.json.

    Raises ConfigError for an odd number of channels.
    """
    factor = of_rope(settings, "partial_rotary_factor", default)
    if (rotated := int(head_dim * factor)) % 2:
        raise ConfigError(
            f"config.json: partial_rotary_factor={factor} rotates {rotated} of {head_dim} "
            "channels: only an even number is supported"
        )
    return factor


def _rope_table(settings: hf.Settings) -> hf.Settings:
    """Returns the table of rotary positions. rope_scaling replaces the whole of rope_parameters, as
    transformers has it."""
    return settings.get("rope_scaling") or settings.get("rope_parameters") or {}


def of_rope(settings: hf.Settings, key: str, default: float) -> float:
    """A number of the table of rotary positions, or of config.json's first level."""
    return hf.given(_rope_table(settings), key, hf.given(settings, key, default))


def _yarn(parameters: hf.Settings, *, latent: bool) -> dict[str, Any]:
    hf.only(parameters, attention_factor=())
    both = hf.given(parameters, "mscale", 0) and hf.given(parameters, "mscale_all_dim", 0)
    if not (both and latent):
        hf.only(parameters, mscale_all_dim=(0, 0.0))
    return {
        # transformers scales cosines and sines by the plain rule unless both are given.
        "mscale": float(parameters["mscale"]) if both else 1.0,
        "mscale_all_dim": float(hf.given(parameters, "mscale_all_dim", 0.0)) if latent else 0.0,
        "truncate": bool(hf.given(parameters, "truncate", True)),
    }
