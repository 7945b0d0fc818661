"""Which products of a model run in float8: chosen before anything cuts their weights.

Parameters stay what they were, in type, name and shape. Routers stay in at least float32, since a
rounded score sends a token elsewhere; embeddings and the output layer in the compute type.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Quantize
from titan_moe.moe.layer import MoE
from titan_moe.moe.router import Router
from titan_moe.ops.float8 import ROW_ALIGNMENT, Float8Linear, float8_grouped_mm, float8_linear

LINEAR, GROUPED_MM = "quantize.linear.float8", "quantize.grouped_mm.float8"

# What torch's kernels want: any float8 units, and for grouped GEMMs those of Hopper.
_CAPABILITIES = {LINEAR: (8, 9), GROUPED_MM: (9, 0)}


def check_hardware(converters: Sequence[str], section: Quantize, device: torch.device) -> None:
    """Raises ConfigError where a GPU lacks the units that the converters ask for."""
    if section.linear.float8.emulate or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    lines = [
        f"model.converters: {name} needs a GPU of compute capability {major}.{minor} or more, and "
        f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}: leave it out, or set "
        f"quantize.linear.float8.emulate=true"
        for name, (major, minor) in _CAPABILITIES.items()
        if name in converters and found < (major, minor)
    ]
    if lines:
        raise ConfigError(lines)


def quantize(model: nn.Module, converters: Sequence[str], section: Quantize) -> list[str]:
    """Let a model, or a stage of one, multiply in float8 where the converters say so.

    Returns:
        The names of the Linear layers and MoE layers that do.
    """
    names = []
    if LINEAR in converters:
        linear = section.linear.float8
        multiply = float8_linear(linear.recipe_name, emulate=linear.emulate)
        for name, module in list(_linears(model, linear.filter_fqns)):
            model.set_submodule(name, Float8Linear(module, multiply))
            names.append(name)
    if GROUPED_MM in converters:
        product = float8_grouped_mm(emulate=section.linear.float8.emulate)
        for name, module in model.named_modules():
            if isinstance(module, MoE) and _has_word(
                f"{name}.experts", section.grouped_mm.float8.fqns
            ):
                module.experts.grouped_mm = product
                names.append(name)
    return names


def _linears(model: nn.Module, left_alone: Sequence[str]) -> Iterator[tuple[str, nn.Linear]]:
    routers = (each for each in model.modules() if isinstance(each, Router))
    inside = {id(module) for router in routers for module in router.modules()}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or id(module) in inside:
            continue
        aligned = all(size % ROW_ALIGNMENT == 0 for size in module.weight.shape)
        if aligned and name != "output" and not _has_word(name, left_alone):
            yield name, module


def _has_word(name: str, words: Sequence[str]) -> bool:
    return any(word in name for word in words)
