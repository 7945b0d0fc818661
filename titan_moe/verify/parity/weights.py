"""Their tensors by our names: `hf.keys` applied in memory, a second time beside checkpoint/hf.

Small models only. Carries gradients over, which no folder holds.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from titan_moe.models.hf import HFModel
from titan_moe.models.hf_family import HFWeight


def from_theirs(tensors: Mapping[str, Tensor], model: HFModel) -> dict[str, Tensor]:
    """Copies of tensors that are named and laid out as a Hugging Face model has them, as ours; what
    is absent there is left out here."""
    found = {}
    for ours, ways in _ways(model):
        for way in ways:
            whole = _whole(tensors, way)
            if whole is not None:
                found[ours] = _part(whole, way).clone()
                break
    return found


def _ways(model: HFModel) -> Iterator[tuple[str, list[HFWeight]]]:
    """Every tensor of every layer, with {layer} filled in, theirs and ours."""
    config = model.config
    for pattern, ways in model.keys.items():
        if "{layer}" not in pattern:
            yield pattern, list(ways)
        elif pattern.startswith("mtp."):
            for depth in range(config.num_mtp_layers):
                yield _numbered(pattern, ways, depth, config.num_layers + depth)
        else:
            for layer in range(config.num_layers):
                yield _numbered(pattern, ways, layer, layer)


def _numbered(
    pattern: str, ways: tuple[HFWeight, ...], ours: int, theirs: int
) -> tuple[str, list[HFWeight]]:
    filled = [
        HFWeight(way.name.replace("{layer}", str(theirs)), way.transposed, way.part) for way in ways
    ]
    return pattern.replace("{layer}", str(ours)), filled


def _whole(tensors: Mapping[str, Tensor], way: HFWeight) -> Tensor | None:
    if "{expert}" not in way.name:
        return tensors.get(way.name)
    stack: list[Tensor] = []
    while (name := way.name.replace("{expert}", str(len(stack)))) in tensors:
        stack.append(tensors[name])
    return torch.stack(stack) if stack else None


def _part(tensor: Tensor, way: HFWeight) -> Tensor:
    if way.transposed:
        tensor = tensor.transpose(-1, -2)
    # Of a stack of biases the rows are the last dim, of matrices the one before it.
    dim = -1 if way.name.endswith("bias") else -2
    match way.part:
        case "first half":
            return tensor.chunk(2, dim)[0]
        case "second half":
            return tensor.chunk(2, dim)[1]
        case "even":
            return tensor.movedim(dim, 0)[0::2].movedim(0, dim)
        case "odd":
            return tensor.movedim(dim, 0)[1::2].movedim(0, dim)
    return tensor
