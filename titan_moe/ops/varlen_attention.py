"""Attention over pieces of a stream of tokens, each causal in itself: torch's flash attention.

The rows of a batch lie end to end, and a piece is a document, a chunk or a whole row. The kernel
takes where pieces begin from the device, and from the host only bounds of their number and length,
so that nothing waits. There is none for the CPU: a reference of both directions stands beside it.

The kernel's backward makes the softmax's weights anew from the logarithm of their divisor, and
subtracts the mean of (gradient * output). So it is given both with the sinks in them, and returns
the gradients of an attention with sinks: torch's own wrapper (torch.nn.attention.varlen) drops the
gradient of that logarithm, by which one would add them outside.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_moe.ops.local_attention import LocalAttention

_MAX_HEAD_DIM, _ALIGNMENT = 256, 8


class DocumentBounds(NamedTuple):
    """What the host says of the documents packed into a microbatch's rows."""

    per_row: int
    """No row has more."""
    longest: int
    """None has more tokens."""


class Pieces(NamedTuple):
    """Which tokens of a stream see each other."""

    starts_N1: Tensor
    """int32 [N + 1]: where each piece begins, and the stream's end. Empty ones are allowed."""
    longest: int
    """No piece has more tokens."""
    window: int | None
    """How many tokens a token sees at most, itself among them; None: its piece up to itself."""


def bounds_of(documents_BS: Tensor) -> DocumentBounds:
    """Of rows whose documents are numbered, the same number in one run of tokens.

    Waits for the device, if they are on one.
    """
    begins_BS = F.pad(documents_BS.diff(dim=1) != 0, (1, 0), value=True)
    starts_N = begins_BS.flatten().nonzero()[:, 0]
    end = starts_N.new_full((1,), begins_BS.numel())
    return DocumentBounds(int(begins_BS.sum(1).max()), int(starts_N.diff(append=end).max()))


def pieces_of_rows(
    documents_BS: Tensor, local: LocalAttention | None, bounds: DocumentBounds
) -> Pieces:
    """The pieces of rows that lie end to end: their documents, cut further into chunks."""
    batch, seq_len = documents_BS.shape
    at_S = torch.arange(seq_len, device=documents_BS.device)
    begins_BS = F.pad(documents_BS.diff(dim=1) != 0, (1, 0))
    per_row, longest, window = *bounds, None
    if local is not None and local.kind == "chunk":
        begins_BS = begins_BS | ((at_S % local.size == 0) & (at_S > 0))
        per_row += (seq_len - 1) // local.size
        longest = min(longest, local.size)
    elif local is not None:
        assert local.kind == "window", local.kind
        window = local.size
    # A row's piece of each token, so of each piece the first token; S for those that it lacks.
    piece_BS = begins_BS.cumsum(1)
    pieces_BN = torch.arange(per_row, device=at_S.device).repeat(batch, 1)
    starts_BN = torch.searchsorted(piece_BS, pieces_BN)
    starts_BN += torch.arange(batch, device=at_S.device)[:, None] * seq_len
    starts_N1 = F.pad(starts_BN.flatten(), (0, 1), value=batch * seq_len).int()
    return Pieces(starts_N1, longest, window)


def takes(qk_dim: int, v_dim: int, dtype: torch.dtype) -> bool:
    """Whether torch's kernel can attend with heads of these dims."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    return narrow and v_dim <= qk_dim <= _MAX_HEAD_DIM and qk_dim % _ALIGNMENT == 0


def varlen_attention(
    q_THC: Tensor,
    k_THC: Tensor,
    v_THC: Tensor,
    pieces: Pieces,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """o_THC; differentiable once. Keys and values may have fewer heads than queries, and values
    fewer channels.

    Args:
        sinks_H: a logit per query head that joins each of its softmaxes and brings no value.
    """
    return _VarlenAttention.apply(q_THC, k_THC, v_THC, sinks_H, pieces, scale)


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, q_THC: Tensor, k_THC, v_THC, sinks_H: Tensor | None, pieces: Pieces, scale: float
    ):
        forward = flash_forward if q_THC.is_cuda else reference_forward
        o_THC, lse_HT = forward(q_THC, k_THC, v_THC, pieces, scale)
        if sinks_H is not None:
            own_HT = lse_HT
            lse_HT = torch.logaddexp(own_HT, sinks_H[:, None].to(own_HT.dtype))
            o_THC = (o_THC * (own_HT - lse_HT).exp().T[..., None]).to(o_THC.dtype)
        ctx.save_for_backward(q_THC, k_THC, v_THC, sinks_H, o_THC, lse_HT, pieces.starts_N1)
        ctx.longest, ctx.window, ctx.scale = pieces.longest, pieces.window, scale
        return o_THC

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_THC: Tensor):  # type: ignore[override, no-untyped-def]
        q_THC, k_THC, v_THC, sinks_H, o_THC, lse_HT, starts_N1 = ctx.saved_tensors
        pieces = Pieces(starts_N1, ctx.longest, ctx.window)
        backward = flash_backward if q_THC.is_cuda else reference_backward
        grads = backward(grad_THC, q_THC, k_THC, v_THC, o_THC, lse_HT, pieces, ctx.scale)
        grad_sinks_H = None
        if sinks_H is not None:
            # A logit with the value 0 gets its weight times what the mean value leaves it.
            mean_HT = (grad_THC.to(lse_HT.dtype) * o_THC).sum(-1).T
            weight_HT = (sinks_H[:, None].to(lse_HT.dtype) - lse_HT).exp()
            grad_sinks_H = -(weight_HT * mean_HT).sum(1).to(sinks_H.dtype)
        return *grads, grad_sinks_H, None, None


# --- torch's kernel: private operations, the same in 2.11 to 2.13 ---


def flash_forward(
    q_THC: Tensor, k_THC: Tensor, v_THC: Tensor, pieces: Pieces, scale: float
) -> tuple[Tensor, Tensor]:
    """o_THC, and lse_HT: the natural logarithm of the softmax's divisor, in float32."""
    # Values as wide as keys: the kernel knows one head dim. Not kept for the backward.
    v_dim, qk_dim = v_THC.shape[-1], q_THC.shape[-1]
    o_THC, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q_THC, k_THC, _widened(v_THC, qk_dim), *_places(pieces), False, **_reach(pieces, scale)
    )
    return o_THC[..., :v_dim].contiguous(), lse_HT


def flash_backward(
    grad_THC: Tensor,
    q_THC: Tensor,
    k_THC: Tensor,
    v_THC: Tensor,
    o_THC: Tensor,
    lse_HT: Tensor,
    pieces: Pieces,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, for the weights exp(score - lse) that led to this output."""
    v_dim, qk_dim = v_THC.shape[-1], q_THC.shape[-1]
    grad_THC, v_THC, o_THC = (_widened(x, qk_dim) for x in (grad_THC, v_THC, o_THC))
    state = q_THC.new_empty(2, dtype=torch.uint64), q_THC.new_empty(0)  # Of dropout, which is 0.
    grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
        grad_THC,
        q_THC,
        k_THC,
        v_THC,
        o_THC,
        lse_HT,
        *_places(pieces),
        *state,
        **_reach(pieces, scale),
    )
    return grad_q, grad_k, grad_v[..., :v_dim]


def _places(pieces: Pieces) -> tuple[Any, ...]:
    """cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal."""
    starts, longest = pieces.starts_N1, pieces.longest
    return starts, starts, longest, longest, 0.0, pieces.window is None


def _reach(pieces: Pieces, scale: float) -> dict[str, Any]:
    before = -1 if pieces.window is None else pieces.window - 1
    return {"scale": scale, "window_size_left": before, "window_size_right": 0}


def _widened(x_THC: Tensor, dim: int) -> Tensor:
    return x_THC if x_THC.shape[-1] == dim else F.pad(x_THC, (0, dim - x_THC.shape[-1]))


# --- the reference: all pairs of tokens, any device and type ---


def reference_forward(
    q_THC: Tensor, k_THC: Tensor, v_THC: Tensor, pieces: Pieces, scale: float
) -> tuple[Tensor, Tensor]:
    """As `flash_forward`; sums and lse_HT in at least float32."""
    scores_HTT = _scores(q_THC, k_THC, pieces, scale)
    lse_HT = scores_HTT.logsumexp(-1)
    weights_HTT = (scores_HTT - lse_HT[..., None]).exp()
    o_HTC = weights_HTT @ _by_query_head(v_THC, q_THC)
    return o_HTC.transpose(0, 1).to(q_THC.dtype).contiguous(), lse_HT


def reference_backward(
    grad_THC: Tensor,
    q_THC: Tensor,
    k_THC: Tensor,
    v_THC: Tensor,
    o_THC: Tensor,
    lse_HT: Tensor,
    pieces: Pieces,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `flash_backward`."""
    q_HTC, grad_HTC = (_by_query_head(x, q_THC) for x in (q_THC, grad_THC))
    k_HTC, v_HTC = (_by_query_head(x, q_THC) for x in (k_THC, v_THC))
    weights_HTT = (_scores(q_THC, k_THC, pieces, scale) - lse_HT[..., None]).exp()
    mean_HT = (grad_HTC * _by_query_head(o_THC, q_THC)).sum(-1)
    grad_scores_HTT = weights_HTT * (grad_HTC @ v_HTC.mT - mean_HT[..., None]) * scale
    grads = grad_scores_HTT @ k_HTC, grad_scores_HTT.mT @ q_HTC, weights_HTT.mT @ grad_HTC
    pairs = zip(grads, (q_THC, k_THC, v_THC), strict=True)
    return tuple(_summed_to_heads(grad, like) for grad, like in pairs)  # type: ignore[return-value]


def _scores(q_THC: Tensor, k_THC: Tensor, pieces: Pieces, scale: float) -> Tensor:
    at_T = torch.arange(len(q_THC), device=q_THC.device)
    piece_T = torch.bucketize(at_T, pieces.starts_N1, right=True)
    distance_TT = at_T[:, None] - at_T
    seen_TT = (piece_T[:, None] == piece_T) & (distance_TT >= 0)
    if pieces.window is not None:
        seen_TT &= distance_TT < pieces.window
    scores_HTT = _by_query_head(q_THC, q_THC) @ _by_query_head(k_THC, q_THC).mT * scale
    return scores_HTT.masked_fill(~seen_TT, float("-inf"))


def _by_query_head(x_THC: Tensor, q_THC: Tensor) -> Tensor:
    """[H, T, C], a key's or value's head once for each query head that it serves."""
    wide = torch.promote_types(x_THC.dtype, torch.float32)
    return x_THC.to(wide).transpose(0, 1).repeat_interleave(q_THC.shape[1] // x_THC.shape[1], 0)


def _summed_to_heads(grad_HTC: Tensor, like_THC: Tensor) -> Tensor:
    grouped = grad_HTC.unflatten(0, (like_THC.shape[1], -1)).sum(1)
    return grouped.transpose(0, 1).to(like_THC.dtype)
