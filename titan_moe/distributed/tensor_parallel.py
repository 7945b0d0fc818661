"""Tensor parallelism with sequence parallelism, applied to a plain model by a plan.

Between blocks each rank holds its part of every sequence (arXiv 2205.05198). A plan names, for
modules by pattern, how they are cut:

    gather         the input's parts are gathered: the module sees all tokens
    colwise        a Linear's outputs are cut (weight dim 0, bias dim 0)
    rowwise        a Linear's inputs are cut (weight dim 1): partial outputs are summed and
                   scattered to parts of the sequence; a bias is whole, added after the sum
    vocab_rows     an Embedding's rows are cut: a token unknown here adds zeros to the sum
    vocab_columns  gather, then an output layer of its own rows: logits are cut by vocabulary
    heads          a module that returns its weight, a value per head, returns those of own heads

Whatever a plan does not cut, every tp rank holds whole, and uses for a part of the tokens or of the
heads: its gradient is a part of a sum, which `sum_grads` completes once per step. That rule has no
exceptions. Routers and routed experts are not for plans: their tokens are distinct on every rank.
"""

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_moe.distributed.collectives import gather_tokens, scatter_tokens
from titan_moe.distributed.dtensor import cut_parameter, local_part
from titan_moe.distributed.grad_norm import local_grads
from titan_moe.distributed.mesh import Meshes
from titan_moe.moe.experts import Experts
from titan_moe.moe.layer import MoE


def apply_tensor_parallel(model: nn.Module, plan: Mapping[str, str], meshes: Meshes) -> set[str]:
    """Cut a meta-device model, or a stage of one, over `tp`. No-op at degree 1.

    Returns:
        Names of the parameters that each tp rank holds whole, and has partial gradients of.

    Raises ValueError for a plan that names a router, routed experts or a whole MoE layer, or a way
    to cut that does not exist.
    """
    if meshes.dims.tp == 1:
        return set()
    mesh, group = meshes["tp"], meshes.group("tp")
    for name, module in list(model.named_modules()):
        for pattern, how in plan.items():
            if fnmatchcase(name, pattern) and not isinstance(module, nn.Identity):
                _refuse_routed(model, name)
                if how not in _WAYS:
                    raise ValueError(f"{pattern}: {how!r} is none of {', '.join(_WAYS)}")
                module.forward = _WAYS[how](module, mesh, group)
    return _held_whole(model)


def sum_grads(
    parameters: Iterable[nn.Parameter], group: ProcessGroup, device: torch.device
) -> None:
    """Complete the gradients of parameters that all ranks of the group hold whole, in place.

    One all-reduce for all of them, on `device`, once per step. Collective over the group, whose
    ranks must have gradients of the same parameters.
    """
    grads = local_grads(parameters)
    if not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads]).to(device)
    dist.all_reduce(flat, group=group)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def _refuse_routed(model: nn.Module, name: str) -> None:
    parts = name.split(".")
    for end in range(len(parts)):
        holder = model.get_submodule(".".join(parts[: end + 1]))
        within = parts[end + 1 : end + 2]
        if isinstance(holder, MoE) and within != ["shared_experts"]:
            raise ValueError(
                f"a tensor-parallel plan cannot cut {name}: every rank routes tokens of its own, "
                "and ep and etp cut the experts"
            )


def _held_whole(model: nn.Module) -> set[str]:
    routed = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, Experts)
        for parameter in module.parameters()
    }
    return {
        name
        for name, parameter in model.named_parameters()
        if id(parameter) not in routed and not isinstance(parameter, DTensor)
    }


def _gathered(module: Any, mesh: DeviceMesh, group: ProcessGroup) -> Callable[..., Tensor]:
    compute = module.forward

    def forward(x: Tensor, *args: object) -> Tensor:
        return compute(gather_tokens(x, group), *args)

    return forward


def _colwise(module: Any, mesh: DeviceMesh, group: ProcessGroup) -> Callable[..., Tensor]:
    for name, _ in list(module.named_parameters()):
        cut_parameter(module, name, mesh, [0])
    product = _product(module)

    def forward(x: Tensor) -> Tensor:
        return product(x, local_part(module.weight), _local_bias(module))

    return forward


def _rowwise(module: Any, mesh: DeviceMesh, group: ProcessGroup) -> Callable[..., Tensor]:
    cut_parameter(module, "weight", mesh, [1])
    product = _product(module)

    def forward(x: Tensor) -> Tensor:
        y = scatter_tokens(product(x, local_part(module.weight)), group)
        return y if module.bias is None else y + module.bias

    return forward


def _vocab_rows(module: Any, mesh: DeviceMesh, group: ProcessGroup) -> Callable[..., Tensor]:
    cut_parameter(module, "weight", mesh, [0])
    rank = dist.get_rank(group)

    def forward(tokens_BS: Tensor) -> Tensor:
        weight = local_part(module.weight)
        row_BS = tokens_BS - rank * len(weight)
        elsewhere_BS = (row_BS < 0) | (row_BS >= len(weight))
        x_BSD = F.embedding(row_BS.masked_fill(elsewhere_BS, 0), weight)
        return scatter_tokens(x_BSD.masked_fill(elsewhere_BS[..., None], 0), group)

    return forward


def _vocab_columns(module: Any, mesh: DeviceMesh, group: ProcessGroup) -> Callable[..., Tensor]:
    cut_parameter(module, "weight", mesh, [0])

    def forward(x: Tensor, *args: Any) -> Tensor:
        return module.compute(gather_tokens(x, group), local_part(module.weight), *args)

    return forward


def _heads(module: Any, mesh: DeviceMesh, group: ProcessGroup) -> Callable[..., Tensor]:
    cut_parameter(module, "weight", mesh, [0])
    return lambda: local_part(module.weight)


def _product(module: Any) -> Callable[..., Tensor]:
    """What a Linear multiplies with: low precision sets another `product` before it is cut."""
    return getattr(module, "product", F.linear)


def _local_bias(module: Any) -> Tensor | None:
    return None if module.bias is None else local_part(module.bias)


_WAYS = {
    "gather": _gathered,
    "colwise": _colwise,
    "rowwise": _rowwise,
    "vocab_rows": _vocab_rows,
    "vocab_columns": _vocab_columns,
    "heads": _heads,
}
