"""The keys that each query of a row sees."""

import torch
from torch import Tensor

from titan_moe.ops.local_attention import LocalAttention


def visible(documents_BS: Tensor, local: LocalAttention | None = None) -> Tensor:
    """Returns the rule itself for every pair of a query and a key, [B, S, S]."""
    at = torch.arange(documents_BS.shape[1])
    distance = at[:, None] - at
    same_BSS = documents_BS[:, :, None] == documents_BS[:, None]
    seen_BSS = same_BSS & (distance >= 0)
    if local and local.kind == "window":
        seen_BSS &= distance < local.size
    elif local:
        chunk_BS = (at - same_BSS.int().argmax(-1)) // local.size
        seen_BSS &= chunk_BS[:, :, None] == chunk_BS[:, None]
    return seen_BSS
