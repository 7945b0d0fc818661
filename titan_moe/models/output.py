"""The layers around the blocks: the embedding, the norm, and the output layer with the loss."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_moe.models.config import LOSS_CHUNKS, ModelConfig
from titan_moe.ops.cross_entropy import CrossEntropy, capped, cross_entropy
from titan_moe.ops.embedding import embedding
from titan_moe.ops.linear_cross_entropy import linear_cross_entropy
from titan_moe.ops.operation import at_least_float32
from titan_moe.runtime.regions import region


class Embedding(nn.Embedding):
    """nn.Embedding with float32 sums (`ops.embedding`) that draws no values: training fills all
    parameters later, and to draw on the meta device imports torch's compiler."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__(vocab_size, dim, _weight=torch.empty(vocab_size, dim))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        with region("embedding"):
            return embedding(tokens_BS, self.weight)


class ZeroCentredRMSNorm(nn.RMSNorm):
    """Multiplies by 1 + weight, a sum that is rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x, self.normalized_shape, None, self.eps)
        return torch.addcmul(normed, normed, self.weight)


class LayerNorm(nn.LayerNorm):
    """Computes in at least float32: on a CPU, torch adds up narrow gradients of weight and bias in
    their own type."""

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        weight, bias = self.weight.to(wide), self.bias.to(wide)
        return F.layer_norm(x.to(wide), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def norm_of(config: ModelConfig) -> Callable[[int], nn.RMSNorm]:
    """Returns a function that makes a norm of the model, given the number of channels."""
    kind = ZeroCentredRMSNorm if config.zero_centred_norms else nn.RMSNorm
    return partial(kind, eps=config.norm_eps)


class Output(nn.Linear):
    """Projects to the vocabulary and, given labels, computes the loss itself.

    So no logits leave it, and the loss can be computed in chunks of tokens. The layout sets
    `chunk_size` (None: the device's size) and the strategy `cross_entropy`, both arguments of
    `linear_cross_entropy`.

    Args:
        cap: `ModelConfig.logit_cap`.
    """

    def __init__(self, dim: int, vocab_size: int, cap: float | None = None) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.cap = cap
        self.chunk_size: int | None = 0
        self.cross_entropy: CrossEntropy = cross_entropy

    def forward(
        self,
        x_BSD: Tensor,
        labels_BS: Tensor | None = None,
        factors: Sequence[float] = (1.0,),
        further: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, S, V]; with labels this rank's share of the sum of cross-entropies.

        Args:
            labels_BS: the next token of each; IGNORE_INDEX where there is no target.
            factors: those of `linear_cross_entropy`, one for each part of the rows.
            further: a sum to which the losses of further parts are added, each times its factor.
        """
        with region("loss"):
            weight_VD = self.weight
            if isinstance(weight_VD, DTensor):  # Tensor parallelism cuts it: this rank's rows.
                weight_VD = weight_VD.to_local()
            cap, entropy = self.cap, self.cross_entropy
            if labels_BS is None:
                logits_BSV = F.linear(x_BSD, weight_VD)
                return logits_BSV if cap is None else (logits_BSV / cap).tanh() * cap
            chunk_size = self.chunk_size
            if chunk_size is None:
                chunk_size = LOSS_CHUNKS[x_BSD.device.type]
            losses = linear_cross_entropy(
                x_BSD.flatten(0, 1),
                weight_VD,
                labels_BS.flatten(),
                factors=factors,
                chunk_size=chunk_size,
                cross_entropy=entropy if cap is None else capped(entropy, cap),
            )
            if further is not None:
                with torch.no_grad():
                    further += losses.further
            return losses.loss
