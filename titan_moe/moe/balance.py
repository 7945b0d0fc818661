"""Load balance as pure functions.

Every loss here is a *sum over tokens*; the optimizer step divides it, like the cross-entropy, once
by the global number of target tokens.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


def updated_bias(bias_E: Tensor, counts_E: Tensor, speed: float) -> Tensor:
    """A step of `speed` towards the mean load (arXiv 2408.15664, algorithm 1)."""
    # Integers: in float32 some signs are wrong from 2^24 rows on.
    above_E = counts_E.shape[-1] * counts_E - counts_E.sum(-1, keepdim=True)
    return bias_E - speed * torch.sign(above_E).to(bias_E.dtype)


MARGIN_BINS = 1000
"""Bins of the histogram of `margins`, as many as for Kimi K3 (github.com/pytorch/torchtitan, pull
request 4577)."""


def margins(
    scores_TE: Tensor, bias_E: Tensor, top_k: int, counted_T: Tensor | None = None
) -> Tensor:
    """Counts by expert the biases with which each token would choose it: [E, MARGIN_BINS], int64.

    A bias is the token's K+1-st best biased score, less its score of the expert. The bins span
    `_span`, for scores between 0 and 1. `counted_T`: True for the tokens that count; None: all.
    """
    num_experts = bias_E.shape[0]
    cutoff_T = (scores_TE + bias_E).topk(top_k + 1, dim=-1).values[:, -1:]
    low, width = _span(bias_E)
    bins_TE = ((cutoff_T - scores_TE - low) / width).long().clamp_(0, MARGIN_BINS - 1)
    bins_TE += MARGIN_BINS * torch.arange(num_experts, device=bias_E.device)
    counts = bins_TE.new_zeros(num_experts * MARGIN_BINS)
    ones_TE = torch.ones_like(bins_TE)
    if counted_T is not None:
        ones_TE *= counted_T[:, None]
    counts.scatter_add_(0, bins_TE.flatten(), ones_TE.flatten())
    return counts.view(num_experts, -1)


def quantile_bias(bias_E: Tensor, margins_EB: Tensor, top_k: int, momentum: float) -> Tensor:
    """Returns the biases with which each expert would have been chosen by K / E of the tokens, less
    their mean: quantile balancing (kexue.fm/archives/11619).

    Args:
        bias_E: those that `margins` was given.
        margins_EB: its counts, of all tokens of a step; any leading dims.
        momentum: share of the old biases in the new ones.
    """
    ends_EB = margins_EB.cumsum(-1).double()
    wanted_E1 = ends_EB[..., -1:] * (top_k / bias_E.shape[-1])
    bin_E1 = torch.searchsorted(ends_EB, wanted_E1).clamp(max=MARGIN_BINS - 1)
    inside_E1 = margins_EB.gather(-1, bin_E1).clamp(min=1)
    part_E1 = 1 - (ends_EB.gather(-1, bin_E1) - wanted_E1) / inside_E1
    low, width = _span(bias_E)
    new_E = low + width * (bin_E1 + part_E1)[..., 0]
    new_E = new_E - new_E.mean(-1, keepdim=True)
    return torch.lerp(new_E, bias_E.double(), momentum).to(bias_E.dtype)


def _span(bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the least margin that can be, and the width of a bin."""
    low = bias_E.amin(-1, keepdim=True).double() - 1
    return low, (bias_E.amax(-1, keepdim=True).double() + 1 - low) / MARGIN_BINS


def sequence_loss(scores_BSE: Tensor, chosen_BE: Tensor) -> Tensor:
    """Sequence-wise loss (arXiv 2412.19437, eq. 17-20), times each sequence's number of tokens.

    With frequency f_be = E / (K S) * (times expert e was chosen in sequence b), which has no
    gradient, and scores normalised over experts: sum over b, e of f_be * (sum over s of
    scores_bse). Linear in the scores, so a part of a sequence adds its part of the loss.

    Args:
        scores_BSE: scores of all or some tokens of each sequence.
        chosen_BE: choices of each expert by each *whole* sequence.
    """
    chosen_BE = chosen_BE.to(scores_BSE.dtype)
    total_B1 = chosen_BE.sum(-1, keepdim=True).clamp(min=1)  # A sequence without a choice adds 0.
    frequency_BE = chosen_BE * (chosen_BE.shape[1] / total_B1)
    return (frequency_BE * scores_BSE.sum(1)).sum()


def global_loss(scores_BSE: Tensor, load_E: Tensor) -> Tensor:
    """Global-batch loss: `load_E` holds each expert's share of the previous step's tokens."""
    return scores_BSE.shape[-1] * torch.dot(scores_BSE.sum((0, 1)), load_E.to(scores_BSE.dtype))


def z_loss(logits_TE: Tensor, counted_BS: Tensor | None = None) -> Tensor:
    """Router z-loss of the counted tokens (arXiv 2202.08906, eq. 5): keeps the logits small."""
    squares_T = logits_TE.logsumexp(-1).square()
    return (squares_T if counted_BS is None else squares_T * counted_BS.flatten()).sum()


def counts_per_sequence(experts_BN: Tensor, num_experts: int) -> Tensor:
    """Counts each expert's choices in each sequence: counts_BE.

    Sorted, not scattered: no atomics, no host sync.
    """
    # A radix sort passes over all bytes of its keys: two mostly hold an expert's number.
    dtype = torch.int16 if num_experts < 2**15 else torch.int32
    sorted_BN = experts_BN.to(dtype).sort(-1).values
    borders_E = torch.arange(num_experts + 1, dtype=dtype, device=experts_BN.device)
    borders_BE = borders_E.expand(experts_BN.shape[0], -1).contiguous()
    return torch.searchsorted(sorted_BN, borders_BE).diff(dim=-1)


def attach_loss(x: Tensor, loss: Tensor, total: Tensor) -> Tensor:
    """Return `x` unchanged; its backward also starts the backward of `loss` with gradient 1.

    So a loss computed inside a layer need not be passed to the end of the model, or across pipeline
    stages. The backward adds the loss to `total`: it runs exactly once per microbatch, whatever is
    recomputed, and never in validation. A detached `loss` is only added up.
    """
    return _AttachLoss.apply(x, loss, total)


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, loss: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.total = total  # type: ignore[attr-defined]
        return x.detach()  # Not a view: FSDP warns of a model that returns one.

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override, no-untyped-def]
        (loss,) = ctx.saved_tensors
        ctx.total += loss
        return grad, torch.ones_like(loss), None
