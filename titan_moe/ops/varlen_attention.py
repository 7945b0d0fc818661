"""Attention over pieces of a stream of tokens, each causal in itself: torch's flash attention.

The sequences of a batch lie end to end, and a piece is a document, a chunk or a whole sequence. The
kernel reads from the device where pieces begin, and takes from the host only bounds of their number
and length, so that nothing waits. torch has it for CUDA alone, and without sinks.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.ops.local_attention import LocalAttention

_MAX_HEAD_DIM, _ALIGNMENT = 256, 8


class DocumentBounds(NamedTuple):
    """Holds upper bounds, known to the host, on the documents of a microbatch's sequences."""

    per_sequence: int
    """Most documents of a sequence."""
    longest: int
    """Most tokens of a document."""


class Pieces(NamedTuple):
    """Cuts a stream into pieces; tokens attend only within their piece."""

    starts_N1: Tensor
    """int32 [N + 1]: where each piece begins, and the stream's end. Empty ones are allowed."""
    longest_L: Tensor
    """[most tokens of a piece], without memory: compiled graphs take a size that changes, where
    they would be compiled anew for a number."""
    window: int | None
    """The most tokens that a token sees, itself included; None: its piece up to itself."""


def bounds_of(documents_BS: Tensor) -> DocumentBounds:
    """Computes the bounds from each token's document number; a document is one run of tokens.

    Waits for the device if the numbers are on one.
    """
    begins_BS = F.pad(documents_BS.diff(dim=1) != 0, (1, 0), value=True)
    starts_N = begins_BS.flatten().nonzero()[:, 0]
    end = starts_N.new_full((1,), begins_BS.numel())
    return DocumentBounds(int(begins_BS.sum(1).max()), int(starts_N.diff(append=end).max()))


def pieces_of_sequences(
    documents_BS: Tensor, local: LocalAttention | None, bounds: DocumentBounds
) -> Pieces:
    """Returns the pieces of sequences that lie end to end: documents, cut further into chunks."""
    batch, seq_len = documents_BS.shape
    at_S = torch.arange(seq_len, device=documents_BS.device)
    # Chunks are counted from the first token of each document.
    begins_BS = F.pad(documents_BS.diff(dim=1) != 0, (1, 0))
    per_sequence, longest, window = *bounds, None
    if local is not None and local.kind == "chunk":
        place_BS = at_S - (at_S * begins_BS).cummax(1).values
        begins_BS = begins_BS | ((place_BS % local.size == 0) & (at_S > 0))
        per_sequence += (seq_len - 1) // local.size
        longest = min(longest, local.size)
    elif local is not None:
        assert local.kind == "window", local.kind
        window = local.size
    # A sequence's piece of each token, so of each piece the first token; S for those that it lacks.
    piece_BS = begins_BS.cumsum(1)
    pieces_BN = torch.arange(per_sequence, device=at_S.device).repeat(batch, 1)
    starts_BN = torch.searchsorted(piece_BS, pieces_BN)
    starts_BN += torch.arange(batch, device=at_S.device)[:, None] * seq_len
    starts_N1 = F.pad(starts_BN.flatten(), (0, 1), value=batch * seq_len).int()
    # At least 2: graphs are compiled apart for a size of 1.
    pieces = Pieces(starts_N1, starts_N1.new_empty(()).expand(max(longest, 2)), window)
    # Imported here: it takes seconds.
    from torch._dynamo import maybe_mark_dynamic

    for x in (pieces.starts_N1, pieces.longest_L):
        maybe_mark_dynamic(x, 0)
    return pieces


def takes(qk_dim: int, v_dim: int, dtype: torch.dtype) -> bool:
    """Returns whether torch's kernel can attend with heads of these dims in this type."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    return narrow and v_dim <= qk_dim <= _MAX_HEAD_DIM and qk_dim % _ALIGNMENT == 0


def varlen_operation() -> Any:
    """The operation of torch that `varlen_attention` calls; its results serve its backward."""
    from torch.nn.attention import varlen  # noqa: F401  Registers it.

    return torch.ops.torch_attn._varlen_attn.default


def varlen_attention(
    q_THC: Tensor, k_THC: Tensor, v_THC: Tensor, pieces: Pieces, scale: float
) -> Tensor:
    """Returns o_THC, differentiable once. Keys and values may have fewer heads than queries, and
    values fewer channels."""
    # Imported here: it imports Dynamo, which takes seconds.
    from torch.nn.attention.varlen import varlen_attn

    v_dim, qk_dim = v_THC.shape[-1], q_THC.shape[-1]
    if v_dim < qk_dim:  # The kernel knows one head dim.
        v_THC = F.pad(v_THC, (0, qk_dim - v_dim))
    starts, longest = pieces.starts_N1, len(pieces.longest_L)
    asked: dict[str, Any] = {}
    # torch 2.11 takes fewer heads of keys and values without being asked.
    if "enable_gqa" in (varlen_attn.__kwdefaults__ or {}):
        asked["enable_gqa"] = q_THC.shape[1] != k_THC.shape[1]
    o_THC = varlen_attn(
        *(q_THC, k_THC, v_THC, starts, starts, longest, longest),
        scale=scale,
        window_size=(-1 if pieces.window is None else pieces.window - 1, 0),
        **asked,
    )
    return cast(Tensor, o_THC)[..., :v_dim]
