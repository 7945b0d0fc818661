"""Whole rows by index: copied to where experts want them, and added up where tokens want them.

One pass each over what is read and written, which is what bounds them. Both add in a fixed order
and write each row once, so that a repeat gives the same bits on any device.
"""

from torch import Tensor


def copy_rows(x_TD: Tensor, source_R: Tensor, *, is_padded: bool) -> Tensor:
    """x_RD with x_TD[source_R[r]] in row r; zeros where the source is -1.

    Args:
        x_TD: rows.
        source_R: int64; which row to copy.
        is_padded: whether there may be a -1.
    """
    if x_TD.is_cuda:
        # Imported here: a CPU run has no Triton and no use for it.
        from titan_moe.ops.move_rows_triton import copy_rows as copy_rows_triton

        return copy_rows_triton(x_TD, source_R)
    return copy_rows_reference(x_TD, source_R, is_padded=is_padded)


def add_rows(y_RD: Tensor, rows_TK: Tensor) -> Tensor:
    """y_TD, the sum of each token's rows y_RD[rows_TK[t]], in the order of k.

    Sums of narrow types are float32 and rounded once.

    Args:
        y_RD: rows.
        rows_TK: int64, none negative; the K rows of each token.
    """
    if y_RD.is_cuda:
        from titan_moe.ops.move_rows_triton import add_rows as add_rows_triton

        return add_rows_triton(y_RD, rows_TK)
    return add_rows_reference(y_RD, rows_TK)


def copy_rows_reference(x_TD: Tensor, source_R: Tensor, *, is_padded: bool = True) -> Tensor:
    """`copy_rows` in plain torch: two passes where there is padding."""
    if not is_padded:
        return x_TD.index_select(0, source_R)
    if not len(x_TD):  # All of them are padding, and there is nothing to select from.
        return x_TD.new_zeros(len(source_R), x_TD.shape[1])
    x_RD = x_TD.index_select(0, source_R.clamp_min(0))
    return x_RD.masked_fill_((source_R < 0)[:, None], 0)


def add_rows_reference(y_RD: Tensor, rows_TK: Tensor) -> Tensor:
    """`add_rows` in plain torch, by way of a [T * K, D] tensor."""
    num_tokens, top_k = rows_TK.shape
    y_ND = y_RD.index_select(0, rows_TK.flatten())
    return y_ND if top_k == 1 else y_ND.unflatten(0, (num_tokens, top_k)).sum(1)
