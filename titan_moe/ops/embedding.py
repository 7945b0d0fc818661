"""Looks rows of an embedding up by token. A row's gradient is summed over its tokens in at least
float32."""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_moe.ops.linear import linear
from titan_moe.ops.operation import at_least_float32, operation

_FEW_ON_CUDA = 3072
"""Most tokens that torch's CUDA kernel for few tokens takes (Embedding.cu)."""


def embedding(tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
    """Returns the tokens' rows of the weight, x_BSD. IndexError on a CPU for an unknown token."""
    size = len(weight_VD)
    return linear(
        weight_VD,
        lambda weight_VD: F.embedding(tokens_BS, weight_VD),
        lambda grad_BSD, tokens_BS: embedding_grad(grad_BSD, tokens_BS, size),
        tokens_BS,
    )


def embedding_grad_reference(grad_BSD: Tensor, tokens_BS: Tensor, vocab_size: int) -> Tensor:
    """Computes `embedding_grad` by torch's kernels.

    The CPU's kernel adds in the gradient's type, and loses most of a frequent token's sum. So
    narrow gradients are widened, T rows of them, and so are sums, a row for each distinct token.
    CUDA's kernel for few tokens rounds its sums after every 32 of them; padding with zeros avoids
    it, and the other kernel adds in float32.
    """
    grad_TD, tokens_T = grad_BSD.reshape(-1, grad_BSD.shape[-1]), tokens_BS.flatten()
    wide = at_least_float32(grad_TD)
    if grad_TD.dtype == wide:
        return _summed(grad_TD, tokens_T, vocab_size)
    if grad_TD.is_cuda:
        missing = max(_FEW_ON_CUDA + 1 - len(tokens_T), 0)
        grad_TD, tokens_T = F.pad(grad_TD, (0, 0, 0, missing)), F.pad(tokens_T, (0, missing))
        return _summed(grad_TD, tokens_T, vocab_size)
    present_N, place_T = tokens_T.unique(return_inverse=True)
    sums_ND = _summed(grad_TD.to(wide), place_T, len(present_N)).to(grad_TD.dtype)
    return grad_TD.new_zeros(vocab_size, grad_TD.shape[1]).index_copy_(0, present_N, sums_ND)


def _summed(grad_TD: Tensor, tokens_T: Tensor, num_rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad_TD, tokens_T, num_rows, -1, False)


@operation("embedding_grad", embedding_grad_reference)
def embedding_grad(grad_BSD: Tensor, tokens_BS: Tensor, vocab_size: int) -> Tensor:
    """The weight's gradient, [V, D]: the sum over each token's places, rounded once."""
    return grad_BSD.new_empty(vocab_size, grad_BSD.shape[-1])
