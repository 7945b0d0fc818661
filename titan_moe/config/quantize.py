"""Products in low precision."""

from typing import Literal

from pydantic import Field

from titan_moe.config.section import Section


class Float8Linear(Section):
    """Linear layers in float8 (torchao); model.converters switches them on."""

    recipe_name: Literal["rowwise", "rowwise_with_gw_hp", "tensorwise"] = "rowwise"
    """Scales: one for each row or column ('rowwise'), the same but for the weights' gradient, which
    stays in the compute type ('rowwise_with_gw_hp'), or one for each tensor ('tensorwise',
    torchtitan's default)."""
    filter_fqns: list[str] = Field([])
    """Layers with one of these words in their name are left alone, such as "attention". The output
    layer and routers always are, and layers whose sizes are no multiples of 16."""
    emulate: bool = False
    """Round as float8 does but multiply in float32, on any machine; slow, to look at the effect.
    Holds for grouped_mm too."""


class Linear(Section):
    """Linear layers."""

    float8: Float8Linear = Float8Linear()


class Float8GroupedMM(Section):
    """Routed experts in float8, scaled row-wise (torchao); model.converters switches them on."""

    fqns: list[str] = Field(["experts"])
    """Experts with one of these words in their name (torchtitan's default is none)."""


class GroupedMM(Section):
    """Routed experts."""

    float8: Float8GroupedMM = Float8GroupedMM()


class Quantize(Section):
    """Products in low precision; the keys matter where model.converters names their table."""

    linear: Linear = Linear()
    grouped_mm: GroupedMM = GroupedMM()
