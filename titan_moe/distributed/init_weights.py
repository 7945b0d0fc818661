"""Initial weights as a function of (seed, parameter name, expert index) alone.

DTensor's own generator draws the same shard on every rank of a CPU mesh. Here each rank draws whole
tensors (of a stack of experts: one expert at a time) and keeps its slice, so every layout of one
device type starts from the same bits.
"""

import hashlib
from collections.abc import Callable, Mapping
from math import log
from types import MappingProxyType

import torch
from torch import Tensor, nn

from titan_moe.distributed.dtensor import local_part, local_slices


@torch.no_grad()
def fill_initial_weights(
    model: nn.Module,
    seed: int,
    std_of: Callable[[str], float | tuple[float, ...] | None],
    *,
    drawn_as: Mapping[str, str] = MappingProxyType({}),
    device: torch.device | None = None,
) -> None:
    """Fill every parameter: ones where `std_of(name)` is None, normal with that deviation where it
    is a number, else as `decoder.initial_std` says.

    Drawn in float32 whatever the parameter's type, so that a float64 run starts from the same
    values; on `device`, wherever the parameter is kept (left out: there). A name in `drawn_as` gets
    the values of another one, of the same shape.
    """
    for own_name, parameter in model.named_parameters():
        name = drawn_as.get(own_name, own_name)
        std = std_of(name)
        if std is None:
            local_part(parameter).fill_(1.0)
        elif ".experts." in name:
            assert isinstance(std, float)
            _fill_experts(parameter, f"{seed}/{name}", std, device or parameter.device)
        else:
            whole = _draw(parameter.shape, device or parameter.device, f"{seed}/{name}", std)
            local_part(parameter).copy_(whole[local_slices(parameter)])


def _fill_experts(parameter: Tensor, key: str, std: float, device: torch.device) -> None:
    experts, *inner = local_slices(parameter)
    local = local_part(parameter)
    for row, expert in enumerate(range(experts.start, experts.stop)):
        whole = _draw(parameter.shape[1:], device, f"{key}/{expert}", std)
        local[row].copy_(whole[tuple(inner)])


def _draw(
    shape: torch.Size, device: torch.device, key: str, std: float | tuple[float, ...]
) -> Tensor:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
    drawn = torch.empty(shape, dtype=torch.float32, device=device)
    if isinstance(std, tuple):
        low, high, *least = std
        if not least:
            return drawn.uniform_(low, high, generator=generator).log_()
        steps = drawn.uniform_(log(low), log(high), generator=generator).exp_().clamp_min_(*least)
        return steps.expm1_().log_()
    return drawn.normal_(0.0, std, generator=generator)
