"""Moves of rows, and the maps they follow, as operations that torch.compile does not look into.

On a GPU they are Triton kernels already, and on a CPU they look at their indices. Importing this
file registers `torch.ops.titan_moe.copy_rows`, `add_rows` and `permute_indices`, which their
namesakes call while a graph is traced; gradients are those of the functions that call these.
"""

import torch
from torch import Tensor

from titan_moe.ops import move_rows, permute_indices


@torch.library.custom_op("titan_moe::copy_rows", mutates_args=())
def _copy_rows(x_TD: Tensor, source_R: Tensor) -> Tensor:
    return move_rows.copy_rows(x_TD, source_R)


@_copy_rows.register_fake
def _(x_TD: Tensor, source_R: Tensor) -> Tensor:
    return x_TD.new_empty(source_R.shape[0], x_TD.shape[1])


@torch.library.custom_op("titan_moe::add_rows", mutates_args=())
def _add_rows(y_RD: Tensor, rows_TK: Tensor) -> Tensor:
    return move_rows.add_rows(y_RD, rows_TK)


@_add_rows.register_fake
def _(y_RD: Tensor, rows_TK: Tensor) -> Tensor:
    return y_RD.new_empty(rows_TK.shape[0], y_RD.shape[1])


@torch.library.custom_op("titan_moe::permute_indices", mutates_args=())
def _permute_indices(
    counts_PE: Tensor, num_rows: int, row_alignment: int, max_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    permuted = permute_indices.permute_indices(
        counts_PE, num_rows=num_rows, row_alignment=row_alignment, max_rows=max_rows
    )
    return permuted.source_R, permuted.position_R, permuted.offsets_E, permuted.counts_E


@_permute_indices.register_fake
def _(
    counts_PE: Tensor, num_rows: int, row_alignment: int, max_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device, num_experts = counts_PE.device, counts_PE.shape[1]
    return (
        torch.empty(max_rows, dtype=torch.int64, device=device),
        torch.empty(num_rows, dtype=torch.int64, device=device),
        counts_PE.new_empty(num_experts, dtype=torch.int32),
        counts_PE.new_empty(num_experts),
    )
