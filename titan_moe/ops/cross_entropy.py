"""The sum of cross-entropies and its gradient for the logits, of the vocabulary or a block of it.

On CUDA one kernel puts the gradient in the logits' place, in their type; plain torch holds the
logits, float32 probabilities and rounded gradients beside each other.
"""

from collections.abc import Callable

from torch import Tensor

from titan_moe.ops.operation import at_least_float32, bent, with_kernel

IGNORE_INDEX = -100
"""A label that stands for no target."""

CrossEntropy = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes logits_TV, which it may overwrite, and labels_T. Returns the sum of cross-entropies and its
gradient for the logits."""


@with_kernel("cross_entropy_triton")
def cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the sum of cross-entropies, in float64, and its gradient for logits of the whole
    vocabulary, in at least float32.

    A label outside of the vocabulary makes sum and row NaN on CUDA, and an IndexError elsewhere.
    """
    ignored_T = labels_T == IGNORE_INDEX
    target_T1 = labels_T.masked_fill(ignored_T, 0)[:, None]
    log_probability_TV = logits_TV.log_softmax(-1, at_least_float32(logits_TV))
    losses_T = log_probability_TV.gather(1, target_T1)[:, 0].neg().masked_fill(ignored_T, 0)
    counted_T1 = (~ignored_T)[:, None].to(losses_T.dtype)
    grad_TV = log_probability_TV.exp_().mul_(counted_T1)
    # One column a token: nothing is added twice.
    grad_TV.scatter_add_(1, target_T1, -counted_T1)
    return losses_T.double().sum(), grad_TV


def capped(cross_entropy: CrossEntropy, cap: float) -> CrossEntropy:
    """Returns the CrossEntropy of cap * tanh(logits / cap), given that of plain logits."""

    def of_capped(logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        capped_TV, slope_TV = bent(logits_TV, cap)
        loss, grad_TV = cross_entropy(capped_TV, labels_T)
        return loss, grad_TV.mul_(slope_TV)

    return of_capped


@with_kernel("cross_entropy_triton")
def block_statistics(
    logits_TV: Tensor, labels_T: Tensor, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes softmax statistics of a block of the vocabulary that begins with the token `first`,
    in at least float32.

    Returns each token's largest logit, its sum of exp(logit - largest), and its label's logit, 0 if
    the block does not contain the label.
    """
    wide_TV = logits_TV.to(at_least_float32(logits_TV))
    largest_T = wide_TV.amax(-1)
    column_T, elsewhere_T = _columns(labels_T, first, logits_TV.shape[1])
    target_T = wide_TV.gather(1, column_T[:, None])[:, 0].masked_fill(elsewhere_T, 0)
    return largest_T, (wide_TV - largest_T[:, None]).exp().sum(-1), target_T


@with_kernel("cross_entropy_triton")
def gradient_in_place(logits_TV: Tensor, labels_T: Tensor, first: int, lse_T: Tensor) -> Tensor:
    """Put the gradient in the logits' place; returns `logits_TV`.

    Args:
        logits_TV: logits of a block of the vocabulary that begins with the token `first`.
        lse_T: logarithms of the divisors of the softmaxes over the whole vocabulary.
    """
    grad_TV = (logits_TV.to(lse_T.dtype) - lse_T[:, None]).exp()
    column_T, elsewhere_T = _columns(labels_T, first, logits_TV.shape[1])
    here_T = (~elsewhere_T).to(grad_TV.dtype)
    grad_TV.scatter_add_(1, column_T[:, None], -here_T[:, None])
    return logits_TV.copy_(grad_TV.masked_fill_((labels_T == IGNORE_INDEX)[:, None], 0))


def _columns(labels_T: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns each label's column in the block, 0 if it is elsewhere, and which are elsewhere."""
    column_T = labels_T - first
    elsewhere_T = (column_T < 0) | (column_T >= width)
    return column_T.masked_fill(elsewhere_T, 0), elsewhere_T
