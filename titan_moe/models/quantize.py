"""Chooses the products of a model that run in float8, before its weights are sharded.

Parameters stay what they were, in type, name and shape. Routers stay in at least float32, since a
rounded score sends a token elsewhere; embeddings, the output layer, indexers and the gates of
recurrent layers in the compute type.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Float8GroupedMM, MxGroupedMM, Quantize
from titan_moe.moe.experts import ExpertOutputs
from titan_moe.moe.layer import MoE
from titan_moe.moe.router import Router
from titan_moe.ops.float8 import ALIGNMENTS, Float8Linear, float8_grouped_mm, float8_linear

LINEAR, GROUPED_MM = "quantize.linear.float8", "quantize.grouped_mm.float8"
GROUPED_MX = "quantize.grouped_mm.mx"

# torch's kernels need any float8 units, for grouped GEMMs those of Hopper, for mxfp8 those of
# Blackwell.
_CAPABILITIES = {LINEAR: (8, 9), GROUPED_MM: (9, 0), GROUPED_MX: (10, 0)}


def check_hardware(converters: Sequence[str], section: Quantize, device: torch.device) -> None:
    """Raises ConfigError where a GPU, or the installation, lacks what the converters ask for."""
    if section.linear.float8.emulate or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    gpu = f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"
    emulate = "or set quantize.linear.float8.emulate=true"
    lines = [
        f"model.converters: {name} needs a GPU of compute capability {major}.{minor} or more, and "
        f"{gpu}: leave it out, {emulate}"
        for name, (major, minor) in _CAPABILITIES.items()
        if name in converters and found < (major, minor)
    ]
    if lines:
        raise ConfigError(lines)


def row_alignment(converters: Sequence[str], section: Quantize) -> int:
    """Returns the number that each padded expert's row count must be a multiple of."""
    return max((ALIGNMENTS[each.recipe_name] for each in _experts(converters, section)), default=1)


def quantize(model: nn.Module, converters: Sequence[str], section: Quantize) -> list[str]:
    """Let a model, or a stage of one, multiply in float8 where the converters say so.

    Returns:
        The names of the Linear layers and MoE layers that do.
    """
    names = []
    emulate = section.linear.float8.emulate
    if LINEAR in converters:
        linear = section.linear.float8
        multiply = float8_linear(linear.recipe_name, emulate=emulate)
        unit = ALIGNMENTS[linear.recipe_name]
        for name, module in list(_linears(model, linear.filter_fqns, unit)):
            model.set_submodule(name, Float8Linear(module, multiply))
            names.append(name)
    for experts in _experts(converters, section):
        product = float8_grouped_mm(experts.recipe_name, emulate=emulate)
        for name, module in list(model.named_modules()):
            if isinstance(module, MoE) and any(word in f"{name}.experts" for word in experts.fqns):
                plain = module.experts.compute
                module.experts.compute = ExpertOutputs(
                    plain.activation, scale_inputs=plain.scale_inputs, multiply=product
                )
                names.append(name)
    return names


def _experts(
    converters: Sequence[str], section: Quantize
) -> Iterator[Float8GroupedMM | MxGroupedMM]:
    """Yields the keys of each converter of experts among these."""
    if GROUPED_MM in converters:
        yield section.grouped_mm.float8
    if GROUPED_MX in converters:
        yield section.grouped_mm.mx


def _linears(
    model: nn.Module, left_alone: Sequence[str], unit: int
) -> Iterator[tuple[str, nn.Linear]]:
    routers = (each for each in model.modules() if isinstance(each, Router))
    inside = {id(module) for router in routers for module in router.modules()}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or id(module) in inside:
            continue
        aligned = all(size % unit == 0 for size in module.weight.shape)
        kept = name == "output" or ".gates." in name or ".indexer." in name
        if aligned and not kept and not any(word in name for word in left_alone):
            yield name, module
