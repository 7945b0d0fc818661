"""Rotary positions of config.json. No torch.

Positions are read in two forms: that of published models (`rope_theta`, `rope_scaling`), and what
transformers 5 writes (`rope_parameters`). The first is written, which all readers know, unless
kinds of layers differ.
"""

from collections.abc import Mapping
from typing import Any, Literal

from titan_moe.config.errors import ConfigError
from titan_moe.models.config import GQAConfig, Llama3Scaling, RopeConfig, YarnScaling
from titan_moe.models.hf_reading import Settings, given, needed, only

_ORIGINAL = "original_max_position_embeddings"
_SCALINGS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "yarn": (YarnScaling, ("factor", "beta_fast", "beta_slow")),
    "llama3": (Llama3Scaling, ("factor", "low_freq_factor", "high_freq_factor")),
}
"""Scalings of positions by rope_type, with the numbers that config.json names alike."""


def rope_to_hf(rope: RopeConfig | None) -> dict[str, Any]:
    """The keys rope_theta and rope_scaling; none without positions."""
    if rope is None:
        return {}
    scaling = rope.scaling
    if scaling is None:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    kind = "yarn" if isinstance(scaling, YarnScaling) else "llama3"
    table: dict[str, Any] = {"rope_type": kind, _ORIGINAL: scaling.original_max_seq_len}
    table |= {name: getattr(scaling, name) for name in _SCALINGS[kind][1]}
    if isinstance(scaling, YarnScaling):
        table["type"] = kind
        if scaling.mscale_all_dim:
            table |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
        if not scaling.truncate:
            table["truncate"] = False
    return {"rope_theta": rope.theta, "rope_scaling": table}


def rope_table(attention: GQAConfig) -> dict[str, Any]:
    """The table of one kind of layers in rope_parameters. The layers have positions."""
    rope, factor = attention.rope, attention.partial_rotary_factor
    assert rope is not None
    written = rope_to_hf(rope)
    kind, scaling = "default", written.pop("rope_scaling") or {}
    if rope.share != 1:  # All channels rotate, of which a share of the pairs turns.
        kind, factor = "proportional", rope.share
    return {"rope_type": kind, **scaling, **written, "partial_rotary_factor": factor}


def rope_from_hf(
    settings: Settings,
    *,
    theta: float = 10_000.0,
    pairing: Literal["halves", "neighbours"] = "halves",
    latent: bool = False,
    partial: bool = False,
) -> RopeConfig:
    """Rotary positions. Raises ConfigError for a scaling that is not known.

    Args:
        theta: used where config.json has none.
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
    theta = float(of_rope(settings, "rope_theta", theta))
    kind = given(parameters, "rope_type", given(parameters, "type", "default"))
    if kind == "default":
        return RopeConfig(theta, pairing)
    only({"rope_type": kind}, rope_type=tuple(_SCALINGS))
    if not partial:
        factor = of_rope(settings, "partial_rotary_factor", 1.0)
        only({"partial_rotary_factor": factor}, partial_rotary_factor=(1.0,))
    scaling, names = _SCALINGS[kind]
    needed(parameters, "factor")
    numbers = {name: float(parameters[name]) for name in names if parameters.get(name) is not None}
    more = _yarn(parameters, latent=latent) if kind == "yarn" else {}
    longest = given(parameters, _ORIGINAL, settings.get("max_position_embeddings"))
    original = given(settings, _ORIGINAL, longest)
    return RopeConfig(
        theta, pairing, scaling(original_max_seq_len=int(original), **numbers, **more)
    )


def rotary_factor(settings: Settings, head_dim: int, default: float) -> float:
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


def _rope_table(settings: Settings) -> Settings:
    """Returns the table of rotary positions. rope_scaling replaces the whole of rope_parameters, as
    transformers has it."""
    return settings.get("rope_scaling") or settings.get("rope_parameters") or {}


def of_rope(settings: Settings, key: str, default: float) -> float:
    """A number of the table of rotary positions, or of config.json's first level."""
    return given(_rope_table(settings), key, given(settings, key, default))


def _yarn(parameters: Settings, *, latent: bool) -> dict[str, Any]:
    only(parameters, attention_factor=())
    both = given(parameters, "mscale", 0) and given(parameters, "mscale_all_dim", 0)
    if not (both and latent):
        only(parameters, mscale_all_dim=(0, 0.0))
    return {
        # transformers scales cosines and sines by the plain rule unless both are given.
        "mscale": float(parameters["mscale"]) if both else 1.0,
        "mscale_all_dim": float(given(parameters, "mscale_all_dim", 0.0)) if latent else 0.0,
        "truncate": bool(given(parameters, "truncate", True)),
    }
