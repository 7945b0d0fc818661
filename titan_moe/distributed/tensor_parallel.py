"""Tensor parallelism with sequence parallelism, applied to a plain model by a plan.

Between blocks each rank holds its part of every sequence (arXiv 2205.05198). A plan names, for
modules by pattern, how they are cut; a module that is cut gives way to one of this file, with the
same parameter names:

    gather         a pre-forward hook gathers the input's parts: the module sees all tokens
    colwise        ColumnParallelLinear
    colwise_norm   ColumnParallelNorm
    rowwise        RowParallelLinear
    vocab_rows     VocabParallelEmbedding
    vocab_columns  gather, then the output layer works on this rank's rows of its weight: logits
                   are cut by vocabulary
    heads          LocalHeads
    whole          stays as it is

Whatever is not cut, every tp rank holds whole, and uses for a part of the tokens or of the heads:
its gradient is a part of a sum, which `sum_grads` completes once per step. That rule has no
exceptions. An adapter is cut with its layer: one of its two matrices is whole. Routers and routed
experts are not for plans: their tokens are distinct on every rank.
A plan names every other module that has parameters: a new one is an error until its plan is made.
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

from titan_moe.comm.collectives import gather_tokens, scatter_tokens, sum_over_ranks
from titan_moe.distributed.dtensor import cut_parameter, local_part
from titan_moe.distributed.grad_norm import local_grads
from titan_moe.distributed.parallel_dims import Meshes
from titan_moe.moe.layer import MoE
from titan_moe.ops.cross_entropy import IGNORE_INDEX, block_statistics, gradient_in_place
from titan_moe.ops.embedding import embedding
from titan_moe.ops.float8 import Float8Linear
from titan_moe.ops.low_rank import AdaptedLinear, Adapter, low_rank
from titan_moe.runtime.regions import region


def apply_tensor_parallel(model: nn.Module, plan: Mapping[str, str], meshes: Meshes) -> set[str]:
    """Cut a meta-device model, or a stage of one, over `tp`. No-op at degree 1.

    Returns:
        Names of the parameters that each tp rank holds whole, and has partial gradients of.

    Raises ValueError for a plan that names a router, routed experts or a whole MoE layer, and for a
    plan that leaves out a module with parameters.
    """
    if meshes.dims.tp == 1:
        return set()
    mesh, group = meshes["tp"], meshes.group("tp")
    unplanned = unplanned_modules(model, plan)
    for name, module in list(model.named_modules()):
        for pattern, how in plan.items():
            if fnmatchcase(name, pattern) and not isinstance(module, nn.Identity | Adapter):
                if _is_routed(model, name):
                    raise ValueError(
                        f"a tensor-parallel plan cannot cut {name}: every rank routes tokens of "
                        "its own, and ep and etp cut the experts"
                    )
                cut = _WAYS[how](module, mesh, group)
                if cut is not module:
                    model.set_submodule(name, cut)
    if unplanned:
        raise ValueError(
            f"no tensor-parallel plan names {', '.join(unplanned)}: add to "
            f"titan_moe/models/tensor_plan.py how tp cuts each, or that it stays whole"
        )
    return {
        name
        for name, parameter in model.named_parameters()
        if ".experts." not in name and not isinstance(parameter, DTensor)
    }


def sum_grads(
    parameters: Iterable[nn.Parameter], group: ProcessGroup, device: torch.device
) -> None:
    """Complete the gradients of parameters that all ranks of the group hold whole, in place.

    One all-reduce for all of them, on `device`, once per step; offloaded gradients travel there and
    back in one piece. Collective over the group, whose ranks must have gradients of the same
    parameters.
    """
    grads = local_grads(parameters)
    if not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads]).to(device)
    dist.all_reduce(flat, group=group)
    flat = flat.to(grads[0].device)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def unplanned_modules(model: nn.Module, plan: Mapping[str, str]) -> list[str]:
    """The modules with parameters of their own that no pattern of the plan names."""
    return [
        name
        for name, module in model.named_modules()
        if list(module.parameters(recurse=False))
        and not isinstance(module, Adapter)
        and not any(fnmatchcase(name, pattern) for pattern in plan)
        and not _is_routed(model, name)
    ]


def _is_routed(model: nn.Module, name: str) -> bool:
    """Returns whether a module is an MoE layer, or inside one but not in its shared experts."""
    parts = name.split(".")
    return any(
        isinstance(model.get_submodule(".".join(parts[:end])), MoE)
        and parts[end : end + 1] != ["shared_experts"]
        for end in range(1, len(parts) + 1)
    )


class _Cut(nn.Module):
    """Stands in the place of a module, with its weight cut along `dim` over the mesh."""

    weight: nn.Parameter
    dim = 0

    def __init__(self, module: Any, mesh: DeviceMesh, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self._whole = f"{type(module).__name__}({module.extra_repr()})"
        self.register_parameter("weight", module.weight)
        cut_parameter(self, "weight", mesh, [self.dim])

    def extra_repr(self) -> str:
        return self._whole


class _CutLinear(_Cut):
    """A Linear, maybe with an adapter, whose weight is cut; its bias too, if outputs are."""

    bias: nn.Parameter | None

    def __init__(self, linear: Any, mesh: DeviceMesh, group: ProcessGroup) -> None:
        super().__init__(linear, mesh, group)
        # Low precision is chosen before weights are cut.
        self.product = linear.product if isinstance(linear, Float8Linear) else F.linear
        self.register_parameter("bias", linear.bias)
        if self.dim == 0 and linear.bias is not None:
            cut_parameter(self, "bias", mesh, [0])
        self.adapter: Adapter | None = None
        if isinstance(linear, AdaptedLinear):
            self.adapter = linear.adapter
            # Outputs are rows of b, inputs are columns of a.
            cut_parameter(self.adapter, "ba"[self.dim], mesh, [self.dim])

    def outputs(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns this rank's slice of the outputs, or its terms of their sums."""
        y = self.product(x, local_part(self.weight), bias)
        if (adapter := self.adapter) is None:
            return y
        return y + low_rank(x, local_part(adapter.a), local_part(adapter.b), adapter.scale)


class ColumnParallelLinear(_CutLinear):
    """A Linear whose outputs are cut: weight dim 0, bias dim 0, dim 0 of an adapter's b."""

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x, None if self.bias is None else local_part(self.bias))


class ColumnParallelNorm(_Cut):
    """An RMSNorm over all channels of a ColumnParallelLinear's outputs, of which each rank has its
    part, and that part of the weight. One number a token travels: the sum of squares."""

    def __init__(self, norm: Any, mesh: DeviceMesh, group: ProcessGroup) -> None:
        super().__init__(norm, mesh, group)
        self.width, self.eps = norm.weight.numel(), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = sum_over_ranks(wide.square().sum(-1, keepdim=True), self.group)
        scale = (squares / self.width + self.eps).rsqrt()
        return (wide * scale * local_part(self.weight)).to(x.dtype)


class RowParallelLinear(_CutLinear):
    """A Linear whose inputs are cut (weight dim 1, dim 1 of an adapter's a): partial outputs are
    summed and scattered to parts of the sequence. A bias is whole, added after the sum."""

    dim = 1

    def forward(self, x: Tensor) -> Tensor:
        y = scatter_tokens(self.outputs(x), self.group)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(_Cut):
    """An Embedding whose rows are cut: a token unknown here adds zeros to the sum, which is
    scattered to parts of the sequence."""

    def forward(self, tokens_BS: Tensor) -> Tensor:
        with region("embedding"):
            weight = local_part(self.weight)
            rank, last, rows = self.group.rank(), self.group.size() - 1, len(weight)
            row_BS = tokens_BS - rank * rows
            # The first or the last rank owns a token outside of the vocabulary, and refuses it.
            elsewhere_BS = tokens_BS.div(rows, rounding_mode="floor").clamp(0, last) != rank
            x_BSD = embedding(row_BS.masked_fill(elsewhere_BS, 0), weight)
            return scatter_tokens(x_BSD.masked_fill(elsewhere_BS[..., None], 0), self.group)


class LocalHeads(_Cut):
    """Holds and returns this rank's part of a weight that has one value per head."""

    def forward(self) -> Tensor:
        return local_part(self.weight)


class VocabParallelCrossEntropy:
    """The sum of cross-entropies of logits that are cut by vocabulary, and its gradient.

    Logits are [T, V/tp]: each rank of the group has all tokens and a block of the vocabulary.

    No rank ever holds whole logits; three numbers a token travel (its largest logit, the sum of
    exponentials, its target's logit). A rank's share of the value is that of its part of the
    tokens; its gradient is that of the whole sum. Collective over the group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def __call__(self, logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        """Returns this rank's share of the sum, and the gradient, which overwrites the logits."""
        group, width = self._group, logits_TV.shape[1]
        rank = dist.get_rank(group)
        own_largest_T, own_sum_T, own_target_T = block_statistics(logits_TV, labels_T, rank * width)
        largest_T = own_largest_T.clone()
        dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=group)
        owner_T, ignored_T = labels_T.div(width, rounding_mode="floor"), labels_T == IGNORE_INDEX
        target_T = (own_target_T - largest_T).masked_fill(owner_T != rank, 0)
        sums = torch.stack([own_sum_T * (own_largest_T - largest_T).exp(), target_T])
        dist.all_reduce(sums, group=group)
        sum_T, target_T = sums
        # A label that no rank owns makes its row NaN.
        sum_T.masked_fill_((owner_T.clamp(0, group.size() - 1) != owner_T) & ~ignored_T, torch.nan)
        loss_T = (sum_T.log() - target_T).masked_fill(ignored_T, 0)
        lse_T = largest_T + sum_T.log()
        grad_TV = gradient_in_place(logits_TV, labels_T, rank * width, lse_T)
        return loss_T.tensor_split(group.size())[rank].double().sum(), grad_TV


def _gathered(module: Any, mesh: DeviceMesh, group: ProcessGroup) -> nn.Module:
    def gather(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather_tokens(args[0], group), *args[1:]

    module.register_forward_pre_hook(gather)
    return module


def _vocab_columns(output: Any, mesh: DeviceMesh, group: ProcessGroup) -> nn.Module:
    cut_parameter(output, "weight", mesh, [0])
    return _gathered(output, mesh, group)


_WAYS: Mapping[str, Callable[[Any, DeviceMesh, ProcessGroup], nn.Module]] = {
    "gather": _gathered,
    "colwise": ColumnParallelLinear,
    "colwise_norm": ColumnParallelNorm,
    "rowwise": RowParallelLinear,
    "vocab_rows": VocabParallelEmbedding,
    "vocab_columns": _vocab_columns,
    "heads": LocalHeads,
    "whole": lambda module, mesh, group: module,
}
