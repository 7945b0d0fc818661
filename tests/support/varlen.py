"""torch's variable-length attention by all pairs of tokens, for machines without its kernel."""

from typing import Any

import torch
from torch import Tensor


def slow_varlen_attn(
    q_THC: Tensor,
    k_THC: Tensor,
    v_THC: Tensor,
    *places: Any,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """As `torch.nn.attention.varlen.varlen_attn`, of any type; checks what the kernel takes."""
    starts_N1, key_starts_N1, longest, longest_keys = places
    assert starts_N1 is key_starts_N1 and longest == longest_keys and window_size[1] == 0
    assert starts_N1.dtype is torch.int32 and starts_N1.diff().max() <= longest
    assert q_THC.shape[2] == k_THC.shape[2] == v_THC.shape[2]
    group = q_THC.shape[1] // k_THC.shape[1]
    assert enable_gqa == (group > 1)
    at_T = torch.arange(len(q_THC))
    piece_T = torch.bucketize(at_T, starts_N1, right=True)
    distance_TT = at_T[:, None] - at_T
    seen_TT = (piece_T[:, None] == piece_T) & (distance_TT >= 0)
    if window_size[0] >= 0:
        seen_TT &= distance_TT <= window_size[0]
    q, k, v = (x.transpose(0, 1) for x in (q_THC, k_THC, v_THC))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    weights = (q @ k.mT * scale).masked_fill(~seen_TT, float("-inf")).softmax(-1)
    return (weights @ v).transpose(0, 1)
