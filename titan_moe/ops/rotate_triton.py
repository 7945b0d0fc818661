"""The Triton kernel of rotate: one launch and one pass, arithmetic in the angles' type."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
"""Pairs of channels of a program's tile: 16 for each thread."""


def rotate_heads(
    x_BSHC: Tensor, cos_BSC: Tensor, sin_BSC: Tensor, pairing: str, first: int, backward: bool
) -> Tensor:
    """Computes `rotate.rotate_heads`. Reads heads at any strides; the result is contiguous."""
    x_BSHC = x_BSHC if x_BSHC.stride(-1) == 1 else x_BSHC.contiguous()
    out_BSHC = torch.empty(x_BSHC.shape, dtype=x_BSHC.dtype, device=x_BSHC.device)
    batch, seq_len, heads, dim = x_BSHC.shape
    pairs = cos_BSC.shape[-1]
    if len(cos_BSC) < batch:
        cos_BSC, sin_BSC = (x.expand(batch, seq_len, pairs) for x in (cos_BSC, sin_BSC))
    cos_BSC, sin_BSC = cos_BSC.contiguous(), sin_BSC.contiguous()
    num_rows = batch * seq_len * heads
    columns = triton.next_power_of_2(pairs)
    rows = max(1, _TILE // columns)
    if num_rows:
        _rotate_kernel[(triton.cdiv(num_rows, rows),)](
            x_BSHC,
            cos_BSC,
            sin_BSC,
            out_BSHC,
            num_rows,
            seq_len,
            *x_BSHC.stride()[:3],
            HEADS=heads,
            DIM=dim,
            FIRST=first,
            PAIRS=pairs,
            HALVES=pairing == "halves",
            BACKWARD=backward,
            ROWS=rows,
            COLUMNS=columns,
        )
    return out_BSHC


@triton.jit(do_not_specialize=["num_rows", "seq_len"])
def _rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_rows,
    seq_len,
    batch_stride,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,
    PAIRS: tl.constexpr,
    HALVES: tl.constexpr,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program has some heads of some tokens: one row each."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = (row < num_rows)[:, None]
    token = row // HEADS
    source = token // seq_len * batch_stride + token % seq_len * token_stride
    source = (source + row % HEADS * head_stride)[:, None]
    target = row[:, None] * DIM

    pair = tl.arange(0, COLUMNS)[None, :]
    inside = is_row & (pair < PAIRS)
    angle = token[:, None] * PAIRS + pair
    cos = tl.load(cos_ptr + angle, mask=inside, other=0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0)
    if BACKWARD:
        sin = -sin
    # Neighbours are loaded together and then split: single loads of 2 bytes take twice as many.
    both = tl.arange(0, 2 * COLUMNS)[None, :]
    has_both = is_row & (both < 2 * PAIRS)
    if HALVES:
        a = tl.load(x_ptr + source + FIRST + pair, mask=inside, other=0)
        b = tl.load(x_ptr + source + FIRST + PAIRS + pair, mask=inside, other=0)
    else:
        ab = tl.load(x_ptr + source + FIRST + both, mask=has_both, other=0)
        a, b = tl.split(tl.reshape(ab, (ROWS, COLUMNS, 2)))
    a, b = a.to(cos.dtype), b.to(cos.dtype)
    dtype = out_ptr.dtype.element_ty
    turned_a, turned_b = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)
    if HALVES:
        tl.store(out_ptr + target + FIRST + pair, turned_a, mask=inside)
        tl.store(out_ptr + target + FIRST + PAIRS + pair, turned_b, mask=inside)
    else:
        turned = tl.reshape(tl.join(turned_a, turned_b), (ROWS, 2 * COLUMNS))
        tl.store(out_ptr + target + FIRST + both, turned, mask=has_both)

    # One after the other: in one loop over both sides Triton 3.8 and 3.9 move 2 bytes at a time.
    _copy_columns(x_ptr + source, out_ptr + target, is_row, 0, FIRST, COLUMNS)
    _copy_columns(x_ptr + source, out_ptr + target, is_row, FIRST + 2 * PAIRS, DIM, COLUMNS)


@triton.jit
def _copy_columns(
    x_ptr, out_ptr, is_row, START: tl.constexpr, END: tl.constexpr, COLUMNS: tl.constexpr
):
    for start in range(START, END, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = is_row & (column < END)
        tl.store(out_ptr + column, tl.load(x_ptr + column, mask=inside, other=0), mask=inside)
