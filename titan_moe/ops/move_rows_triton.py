"""The Triton kernels of move_rows: one launch and one pass each, no atomics."""

import triton
import triton.language as tl
from torch import Tensor

# Elements of a program's tile: for bf16 64 bytes in flight per thread, in loads of 16 bytes.
_TILE = 4096
_MAX_COLUMNS = 1024
_MAX_ROWS = 512


def copy_rows(x_TD: Tensor, source_R: Tensor) -> Tensor:
    """Computes `move_rows.copy_rows`."""
    x_TD = x_TD.contiguous()
    num_rows, dim = len(source_R), x_TD.shape[1]
    x_RD = x_TD.new_empty(num_rows, dim)
    rows, columns = _tile(dim, _TILE)
    if x_RD.numel():
        grid = (triton.cdiv(num_rows, rows), triton.cdiv(dim, columns))
        _copy_rows_kernel[grid](x_TD, source_R, x_RD, num_rows, DIM=dim, ROWS=rows, COLUMNS=columns)
    return x_RD


def add_rows(y_RD: Tensor, rows_TK: Tensor, other_RD: Tensor | None = None) -> Tensor:
    """Computes `move_rows.add_rows`."""
    y_RD, rows_TK = y_RD.contiguous(), rows_TK.contiguous()
    num_tokens, top_k = rows_TK.shape
    dim = y_RD.shape[1]
    y_TD = y_RD.new_empty(num_tokens, dim)
    tokens, columns = _tile(dim, _TILE // 2)  # Half of it: the sums take registers as well.
    if y_TD.numel():
        grid = (triton.cdiv(num_tokens, tokens), triton.cdiv(dim, columns))
        _add_rows_kernel[grid](
            y_RD,
            None if other_RD is None else other_RD.contiguous(),
            rows_TK,
            y_TD,
            num_tokens,
            TOP_K=top_k,
            DIM=dim,
            TOKENS=tokens,
            COLUMNS=columns,
            WIDE=y_RD.element_size() == 8,
        )
    return y_TD


def _tile(dim: int, size: int) -> tuple[int, int]:
    """Returns a tile's rows and columns, both powers of two; narrow rows go many at a time."""
    columns = min(triton.next_power_of_2(dim), _MAX_COLUMNS)
    return min(size // columns, _MAX_ROWS), columns


@triton.jit(do_not_specialize=["num_rows"])
def _copy_rows_kernel(
    x_ptr,
    source_ptr,
    out_ptr,
    num_rows,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = row < num_rows
    source = tl.load(source_ptr + row, mask=is_row, other=-1).to(tl.int64)
    inside = (column < DIM)[None, :]
    x = tl.load(
        x_ptr + source[:, None] * DIM + column[None, :],
        mask=(source >= 0)[:, None] & inside,
        other=0,
    )
    tl.store(out_ptr + row[:, None] * DIM + column[None, :], x, mask=is_row[:, None] & inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_rows_kernel(
    y_ptr,
    other_ptr,
    rows_ptr,
    out_ptr,
    num_tokens,
    TOP_K: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_token = token < num_tokens
    inside = is_token[:, None] & (column < DIM)[None, :]
    total = tl.zeros((TOKENS, COLUMNS), dtype=tl.float64 if WIDE else tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(rows_ptr + token * TOP_K + k, mask=is_token, other=-1).to(tl.int64)
        place, present = row[:, None] * DIM + column[None, :], (row >= 0)[:, None] & inside
        y = tl.load(y_ptr + place, mask=present, other=0)
        if other_ptr is not None:
            other = tl.load(other_ptr + place, mask=present, other=0)
            y = (y.to(total.dtype) + other.to(total.dtype)).to(y.dtype)
        total += y.to(total.dtype)
    tl.store(
        out_ptr + token[:, None] * DIM + column[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=inside,
    )
