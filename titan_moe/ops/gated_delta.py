"""Linear recurrences over tokens, the gated delta rule and state space duality, and the short
convolution before them.

Each head has a state S [K, V]. Token t lets it decay, replaces what it holds for the token's key by
the token's value, to the degree beta, and reads it (arXiv 2412.06464, equation 10):

    S <- exp(decay_t) S;  S <- S + k_t (beta_t (v_t - S^T k_t))^T;  o_t = S^T q_t / sqrt(K)

with keys and queries of unit length; in Kimi Delta Attention (arXiv 2510.26692) each of the K rows
of S decays by a factor of its own. State space duality, as in Mamba-2 (arXiv 2405.21060), erases
nothing, and takes keys and queries as they are:

    S <- exp(decay_t) S + k_t (beta_t v_t)^T;  o_t = S^T q_t

The state begins at zero in every document. So a mask is one number per token: its place in its
document, counted from 0.

In plain torch the tokens of a chunk are computed together (section 3.3 of 2412.06464, the WY
representation): products of matrices within all chunks at once, and one state after each chunk.
"""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.ops.attention import first_seen_in_sequences
from titan_moe.ops.operation import at_least_float32
from titan_moe.ops.recomputed import Recomputed, short_convolution

CHUNK_SIZE = 16
CHUNK_SIZE_ON_CUDA = 64
"""Larger than on a CPU, for fewer launches. Where channels decay apart it is not used: each pair of
tokens then has K factors."""
LATEST = 8
"""Number of latest masks whose derived tensors are kept: microbatches may take turns."""
_EPS = 1e-6
_MAX_KEY_DIM = 256
"""Most channels of a key that fla's kernels take; they ask for no multiple."""


DeltaRule = Callable[..., tuple[Tensor, Tensor]]
"""Computes a recurrence over sequences, differentiable once, by torch or by a kernel: takes what
`chunked_rule` does, but for its chunk size."""


class Recurrence:
    """Convolves and recurs, between a recurrent layer's projections, and builds their mask; over
    whole sequences on one device."""

    def __init__(self, rule: DeltaRule, *, mask_documents: bool) -> None:
        self.rule = rule
        self._mask_documents = mask_documents

    def mask(self, documents_BS: Tensor) -> Tensor:
        """Returns the place of this rank's tokens in their documents, [B, S] or [1, S].

        Args:
            documents_BS: numbers each sequence's packed documents, from 0.
        """
        masked = self._mask_documents
        first_BS = first_seen_in_sequences(documents_BS, None, mask_documents=masked)
        return torch.arange(first_BS.shape[1], device=first_BS.device) - first_BS

    def convolve(  # type: ignore[no-untyped-def]
        self, x_BSC: Tensor, weight_C1W: Tensor, place_BS: Tensor, bias_C=None
    ) -> Tensor:
        """`short_convolution` of sequences whose tokens may be on several ranks."""
        return short_convolution(x_BSC, weight_C1W, place_BS, bias_C=bias_C)

    @torch.compiler.disable
    def __call__(  # type: ignore[no-untyped-def]
        self, q_BGSK, k_BGSK, v_BHSV, place_BS: Tensor, decay_BHS, beta_BHS, erases: bool = True
    ) -> Tensor:
        """Returns o_BHSV of the recurrence, as `chunked_rule` explains it; where channels decay
        apart, their decay is [B, H, S, K]."""
        tensors = q_BGSK, k_BGSK, v_BHSV, decay_BHS, beta_BHS
        q, k, v, decay, beta = (x.transpose(1, 2) for x in tensors)
        o_BSHV, _ = self.rule(q, k, v, decay, beta, place_BS, erases=erases)
        return o_BSHV.transpose(1, 2)


def choose_rule(device_type: str, dtype: torch.dtype, key_dim: int) -> DeltaRule:
    """Returns the kernels of the package `fla` on CUDA in 16-bit types, if it is installed and
    takes keys of so many channels; else torch's operations."""
    taken = dtype in (torch.bfloat16, torch.float16) and key_dim <= _MAX_KEY_DIM
    if device_type == "cuda" and taken and fla_kernels():
        return fla_rule
    return chunked_rule


# --- in plain torch ---


def chunked_rule(  # type: ignore[no-untyped-def]
    q_BSGK,
    k_BSGK,
    v_BSHV,
    decay_BSH,
    beta_BSH,
    place_BS: Tensor,
    state_BHKV: Tensor | None = None,
    chunk_size: int | None = None,
    *,
    erases: bool = True,
) -> tuple[Tensor, Tensor]:
    """The `DeltaRule` of torch's own operations, on any device and in any type. Returns o_BSHV, in
    the values' type, and the state after each sequence, in >= float32.

    Computes in at least float32. Keeps its arguments alone for the backward, which computes all
    again, and holds for that time the chunks' matrices [C, C], or [C, C, K] where channels decay
    apart, a few rows of K and V channels per token and head, and a state [K, V] per chunk and head.

    Args:
        q_BSGK, k_BSGK: need no unit length. G divides H; consecutive heads share one.
        decay_BSH: logarithm of the factor that is left of the state, 0 or less; [B, S, H, K] where
            channels decay apart.
        beta_BSH: from 0 to 1; a token's time step where nothing is erased.
        place_BS: each token's place in its document; [1, S] where all sequences' are the same.
        state_BHKV: the state before a sequence, seen by its tokens up to the next document's first
            one, whose place is 0. None: zero.
        chunk_size: tokens that are computed together; None: what suits the device.
        erases: the gated delta rule; else state space duality, of one decay per head.
    """
    if chunk_size is None:
        many = v_BSHV.is_cuda and decay_BSH.ndim == 3
        chunk_size = CHUNK_SIZE_ON_CUDA if many else CHUNK_SIZE
    tensors = (q_BSGK, k_BSGK, v_BSHV, decay_BSH, beta_BSH, place_BS, state_BHKV)
    return Recomputed.apply(partial(_in_chunks, chunk_size, erases), *tensors)


def _in_chunks(  # type: ignore[no-untyped-def]
    chunk_size: int, erases: bool, q_BSGK, k_BSGK, v_BSHV, decay_BSH, beta_BSH, place_BS, state_BHKV
) -> tuple[Tensor, Tensor]:
    """Cuts a sequence into N chunks of C tokens; the H heads are G groups of R."""
    dtype, wide, length = v_BSHV.dtype, at_least_float32(v_BSHV), v_BSHV.shape[1]
    groups = q_BSGK.shape[2]

    def chunks(x_BSH: Tensor) -> Tensor:
        """Returns [B, G, R, N, C, ...]; tokens of no effect fill the last chunk."""
        x = x_BSH.to(wide).unflatten(2, (groups, -1))
        x = F.pad(x, (*[0, 0] * (x.ndim - 2), 0, -length % chunk_size))
        return x.unflatten(1, (-1, chunk_size)).movedim((3, 4), (1, 2))

    q, k = (chunks(_unit(x) if erases else x) for x in (q_BSGK, k_BSGK))
    v = chunks(v_BSHV)
    by_channel = decay_BSH.ndim == 4
    decay = chunks(decay_BSH if by_channel else decay_BSH[..., None])  # [..., C, K or 1]
    beta, total = chunks(beta_BSH)[..., None], _running_sums(decay)
    sees, sees_state = _seen(place_BS, length, chunk_size)
    # Factors that are left of a state: between two tokens, since the chunk's start, until its end.
    between = total[..., :, None, :] - total[..., None, :, :]
    between = between.masked_fill(~sees[..., None], -torch.inf).exp()
    since = total.exp() * sees_state[..., None]
    until = between[..., -1, :, :]

    def products(x: Tensor) -> Tensor:
        """Multiplies each token with its chunk's keys, as they have decayed: [..., C, C]."""
        if by_channel:
            return (x[..., :, None, :] * k[..., None, :, :] * between).sum(-1)
        return x @ k.mT * between[..., 0]

    values, reads, writes = v * beta, q * since, (k * until).mT
    keys, kept = None, since[..., -1, :, None]
    if erases:
        system = (beta * products(k)).tril(-1)
        wanted = torch.cat([v, k * since], -1) * beta
        solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        values, keys = solved.split([v.shape[-1], k.shape[-1]], -1)

    shape = (*v.shape[:3], k.shape[-1], v.shape[-1])
    state = v.new_zeros(shape) if state_BHKV is None else state_BHKV.to(wide).reshape(shape)
    # Chunks are unbound, not indexed: the gradient of one of N is as large as all of them.
    inputs = values, reads, writes, kept, k if keys is None else keys
    added, outputs = [], []
    for value, read, write, factor, key in zip(*(x.unbind(3) for x in inputs), strict=True):
        added.append(value if keys is None else value - key @ state)
        outputs.append(read @ state)
        state = torch.addcmul(write @ added[-1], factor, state)
    o = torch.stack(outputs, 3) + products(q) @ torch.stack(added, 3)
    o = o.flatten(3, 4)[..., :length, :]
    o = o * q.shape[-1] ** -0.5 if erases else o
    return o.flatten(1, 2).transpose(1, 2).to(dtype), state.flatten(1, 2)


def _running_sums(x: Tensor) -> Tensor:
    """Returns the cumsum over dim -2, of at most a chunk's tokens.

    Multiplies with a triangle of ones: torch promises no deterministic cumsum of floats. The
    product is in float64, because TF32 would round one in float32.
    """
    triangle = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.float64, device=x.device).tril()
    return (triangle @ x.double()).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    x = x.to(at_least_float32(x))
    return x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt()


def _seen(place_BS: Tensor, length: int, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Returns whether a token sees each token of its chunk, [B, 1, 1, N, C, C], and the state
    before the chunk, [B, 1, 1, N, C]."""
    opens_BS = F.pad(place_BS == 0, (0, -length % chunk_size))
    document = opens_BS.unflatten(1, (-1, chunk_size)).cumsum(-1)[:, None, None]
    same = document[..., :, None] == document[..., None, :]
    return same.tril(), document == 0


# --- by the kernels of fla ---


@cache
def fla_kernels() -> tuple[Callable[..., Any], ...] | None:
    """Returns `chunk_gated_delta_rule`, `chunk_kda` for channels that decay apart, and
    `chunk_simple_gla`, which erases nothing, of the package `fla` (flash-linear-attention); None if
    it is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError:
        return None
    return chunk_gated_delta_rule, chunk_kda, chunk_simple_gla


@lru_cache(LATEST)
def _pieces(place_BS: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, of the documents or parts of documents of sequences that lie end to end, starts_N1;
    the number of each sequence's first piece, first_B; and whether that goes on from the state
    before the sequence, continues_B.

    Waits for the device in the first layer that uses a mask, because the kernels want the number of
    pieces. They remember the chunks of the tensor `starts_N1` in turn.
    """
    opens_BS = (place_BS == 0).expand(batch, -1)
    cuts_BS = opens_BS.clone()
    cuts_BS[:, 0] = True
    starts_N = cuts_BS.flatten().nonzero()[:, 0]
    first_B = F.pad(cuts_BS.sum(1).cumsum(0), (1, -1))
    return F.pad(starts_N, (0, 1), value=cuts_BS.numel()), first_B, ~opens_BS[:, 0]


def fla_rule(  # type: ignore[no-untyped-def]
    q_BSGK, k_BSGK, v_BSHV, decay_BSH, beta_BSH, place_BS, state_BHKV=None, *, erases: bool = True
) -> tuple[Tensor, Tensor]:
    """The `DeltaRule` of fla's kernels: CUDA, 16-bit types."""
    kernels = fla_kernels()
    assert kernels is not None
    batch, length, heads, _ = v_BSHV.shape
    starts_N1, first_B, continues_B = _pieces(place_BS, batch)
    initial = None
    if state_BHKV is not None:
        count = len(starts_N1) - 1
        initial = state_BHKV.new_zeros(count, *state_BHKV.shape[1:], dtype=torch.float32)
        own_BHKV = state_BHKV.float() * continues_B[:, None, None, None]
        initial = initial.index_copy(0, first_B, own_BHKV)
    # The kernels know as many keys as values.
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q_BSGK, k_BSGK))
    kernel = kernels[decay_BSH.ndim == 4 if erases else 2]
    rows: tuple[Tensor, ...] = q, k, v_BSHV, decay_BSH.float(), beta_BSH.to(v_BSHV.dtype)
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
    if not erases:
        rows = q, k, (v_BSHV * beta_BSH[..., None]).to(v_BSHV.dtype), decay_BSH.float()
        options = {"scale": 1.0}
    o_1THV, states_NHKV = kernel(
        *(x.flatten(0, 1)[None] for x in rows),
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=starts_N1,
        **options,
    )
    last_B = F.pad(first_B[1:], (0, 1), value=len(starts_N1) - 1) - 1
    return o_1THV[0].unflatten(0, (batch, length)), states_NHKV[last_B]
