"""Tensor parallelism whose collectives hide behind its products, through torch's symmetric memory.

`torch.ops.symm_mem.fused_all_gather_matmul` multiplies one rank's part of a sequence while it
copies the next rank's out of that rank's memory, and `fused_matmul_reduce_scatter` computes one
part of its result while it copies those of before. The backward of each is the other.

Parts of the sequence lie along the last dim but one. torch's operations treat that dim as the
outermost one: what they gather, and products of it, are laid out so.

Without CUDA emulations of the same signature stand in, over plain collectives. They check what
torch's code takes for granted. They have not been compared with hardware.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from titan_moe.config.errors import ConfigError
from titan_moe.distributed.collectives import gather_parts, scatter_tokens
from titan_moe.distributed.dtensor import local_part

SCHEMAS = {
    "fused_all_gather_matmul": "symm_mem::fused_all_gather_matmul(Tensor A, Tensor[] Bs, "
    "int gather_dim, str group_name, *, bool return_A=True) -> (Tensor?, Tensor[])",
    "fused_matmul_reduce_scatter": "symm_mem::fused_matmul_reduce_scatter(Tensor A, Tensor B, "
    "str reduce_op, int scatter_dim, str group_name) -> Tensor",
}
_KEY = "parallelism.enable_async_tensor_parallel=true"


def open_workspace(group: ProcessGroup, num_bytes: int, device: torch.device) -> None:
    """Give the operations of a group the memory that its ranks read from each other: bytes of two
    tensors of a rank's part of the largest microbatch. Collective over the group. No-op on a CPU.

    Raises ConfigError, with one line, where torch or the machine cannot.
    """
    if device.type != "cuda":
        return
    # Defines the operations.
    import torch.distributed._symmetric_memory as symm_mem

    for name, known in SCHEMAS.items():
        operation = getattr(torch.ops.symm_mem, name, None)
        if operation is None or str(operation.default._schema) != known:
            raise ConfigError(
                [
                    f"{_KEY}: torch {torch.__version__} has no symm_mem::{name} of the form known: "
                    "leave it out"
                ]
            )
    try:
        symm_mem.get_symm_mem_workspace(group.group_name, num_bytes)
    except RuntimeError as error:
        said = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ConfigError(
            [
                f"{_KEY}: the {group.size()} ranks of tp cannot read each other's memory ({said}): "
                "keep tensor_parallel_degree within the GPUs that NVLink connects, or leave it out"
            ]
        ) from error


class GatheredProducts:
    """Products of all ranks' parts of a sequence with several Linears, gathered once: the call of
    `models.attention.products` for an input [..., S/P, D].

    The Linears themselves are not called: their weights may be cut by rows, or whole.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
        """[..., S, F] of each Linear's rows."""
        weights = [local_part(linear.weight) for linear in linears]  # type: ignore[arg-type]
        found = _GatheredProducts.apply(x, self.group, *weights)
        biases = [linear.bias for linear in linears]
        return tuple(
            y if bias is None else y + local_part(bias)  # type: ignore[arg-type]
            for y, bias in zip(found, biases, strict=True)
        )


def scattered_product(x: Tensor, w_DF: Tensor, group: ProcessGroup) -> Tensor:
    """x @ w.T [..., S, D] of x [..., S, F], summed over ranks, of which each keeps its part of the
    sequence."""
    return _ScatteredProduct.apply(x, w_DF, group)


class _GatheredProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, group: ProcessGroup, *weights_FD: Tensor
    ) -> tuple[Tensor, ...]:
        gathered, found = _all_gather_matmul(x, [w_FD.t() for w_FD in weights_FD], group)
        ctx.save_for_backward(gathered, *weights_FD)
        ctx.group = group  # type: ignore[attr-defined]
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # type: ignore[override, no-untyped-def]
        gathered, *weights_FD = ctx.saved_tensors
        grad = torch.cat(grads, -1)
        grad_x = _matmul_reduce_scatter(grad, torch.cat(weights_FD), ctx.group)
        grad_FD = grad.flatten(0, -2).t() @ gathered.flatten(0, -2)
        return grad_x, None, *grad_FD.split([len(w_FD) for w_FD in weights_FD])


class _ScatteredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, w_DF: Tensor, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, w_DF)
        ctx.group = group  # type: ignore[attr-defined]
        return _matmul_reduce_scatter(x, w_DF.t(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override, no-untyped-def]
        x, w_DF = ctx.saved_tensors
        gathered, (grad_x,) = _all_gather_matmul(grad, [w_DF], ctx.group)
        return grad_x, gathered.flatten(0, -2).t() @ x.flatten(0, -2), None


def _all_gather_matmul(
    x: Tensor, matrices: Sequence[Tensor], group: ProcessGroup
) -> tuple[Tensor, list[Tensor]]:
    dim = x.ndim - 2
    # The order that torch sends in, and asks for.
    x = x.movedim(dim, 0).contiguous().movedim(0, dim)
    fused: Any = emulated_all_gather_matmul
    if x.is_cuda:
        fused = torch.ops.symm_mem.fused_all_gather_matmul
    return fused(x, list(matrices), dim, group.group_name)


def _matmul_reduce_scatter(x: Tensor, matrix: Tensor, group: ProcessGroup) -> Tensor:
    fused: Any = emulated_matmul_reduce_scatter
    if x.is_cuda:
        fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
    return fused(x, matrix, "sum", x.ndim - 2, group.group_name)


# --- what runs without CUDA ---


def emulated_all_gather_matmul(
    A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: Any, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """`torch.ops.symm_mem.fused_all_gather_matmul`, of the dims that are used here.

    Raises AssertionError where torch's would read what it must not, or refuse.
    """
    _check(A, Bs, gather_dim)
    outermost = A.movedim(gather_dim, 0)
    assert outermost.flatten(0, -2).is_contiguous(), "a part that is not contiguous"
    gathered = gather_parts(outermost, _resolve_process_group(group_name)).flatten(0, 1)
    found = [(gathered @ B).movedim(0, gather_dim) for B in Bs]
    return gathered.movedim(0, gather_dim) if return_A else None, found


def emulated_matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: Any
) -> Tensor:
    """`torch.ops.symm_mem.fused_matmul_reduce_scatter`, of the dim that is used here.

    Raises AssertionError as `emulated_all_gather_matmul`.
    """
    _check(A, [B], scatter_dim)
    assert reduce_op == "sum", "another reduction"
    group = _resolve_process_group(group_name)
    return scatter_tokens(A @ B, group)  # An error where a part would be shorter.


def _check(A: Tensor, Bs: list[Tensor], dim: int) -> None:
    assert dim == A.ndim - 2, "parts lie along the last dim but one"
    assert all(B.ndim == 2 and len(B) == A.shape[-1] for B in Bs), "no matrix that A multiplies"
    assert all(B.dtype is A.dtype for B in Bs), "products of two types"
