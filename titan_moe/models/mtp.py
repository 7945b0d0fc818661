"""Multi-token prediction (arXiv 2412.19437, section 2.2): training predicts further tokens too.

Depth k reads at position i the output of depth k - 1 (the first: of the decoder's final norm) and
the embedding of token i + k, and predicts token i + k + 1 with the decoder's own output layer. The
projection's inputs are in the order of the published weights.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from titan_moe.models.config import ModelConfig
from titan_moe.models.output import Embedding, norm_of
from titan_moe.models.rope import RopeKey, Rotation
from titan_moe.ops.local_attention import LocalAttention

Sees = LocalAttention | Literal["state", "nothing"] | None
"""A layer sees the past by attention up to a distance, or by a recurrent state."""
Masks = Mapping[Sees, Any]


class MTPLayer(nn.Module):
    """Computes one depth: norms of both inputs, a projection of both, a block, a norm.

    `tok_embeddings` is a copy (see `tied_weights`): published weights have one in each depth.
    """

    def __init__(self, config: ModelConfig, block: nn.Module) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        self.embedding_norm = norm_of(config)(config.dim)
        self.hidden_norm = norm_of(config)(config.dim)
        self.projection = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.block = block
        self.norm = norm_of(config)(config.dim)

    def forward(
        self,
        tokens_BS: Tensor,
        hidden_BSD: Tensor,
        rotation: Rotation,
        mask: Any,
        counted_BS: Tensor | None,
    ) -> Tensor:
        embedded_BSD = self.tok_embeddings(tokens_BS)
        both = [self.embedding_norm(embedded_BSD), self.hidden_norm(hidden_BSD)]
        x_BSD = self.projection(torch.cat(both, -1))
        return self.norm(self.block(x_BSD, rotation, mask, counted_BS))


class MultiTokenPrediction(nn.Module):
    """Runs all depths and computes their losses.

    A position without a target at some depth, such as the last of a document, has no effect on that
    depth's expert counts, biases and balance losses, nor on its indexer's loss: its token is a
    filler or belongs to another document.

    Buffer: `loss_sum` adds up this step's losses, each times `mtp_loss_weight` over the number of
    depths. The step divides their sum by the number of the decoder's own targets, which are more
    than a depth has.
    """

    loss_sum: Tensor

    def __init__(self, config: ModelConfig, make_block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        depths = range(config.num_mtp_layers)
        self.layers = nn.ModuleDict(
            {str(k): MTPLayer(config, make_block(config.num_layers + k)) for k in depths}
        )
        self.loss_weight = config.mtp_loss_weight / config.num_mtp_layers
        self.register_buffer("loss_sum", torch.empty((), dtype=torch.float64), persistent=False)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Sets the values of a new run; called again when the module leaves `meta`."""
        self.loss_sum.zero_()

    def forward(
        self,
        hidden_BSD: Tensor,
        tokens_BKS: Tensor,
        rotations: Mapping[RopeKey, Rotation],
        masks: Masks,
        counted_BKS: Tensor | None = None,
    ) -> list[Tensor]:
        """Returns the output layer's input for each depth, x_BSD.

        Args:
            hidden_BSD: after the decoder's final norm.
            tokens_BKS: for each depth the tokens k positions on.
            counted_BKS: True where a depth has a target, of the tokens of `hidden_BSD`; None: all.
        """
        hidden = [hidden_BSD]
        counted = [None] * len(self.layers) if counted_BKS is None else counted_BKS.unbind(1)
        depths = zip(self.layers.values(), tokens_BKS.unbind(1), counted, strict=True)
        for layer, tokens_BS, counted_BS in depths:
            block: Any = layer.block
            context = rotations[block.turns], masks[block.sees]
            hidden.append(layer(tokens_BS, hidden[-1], *context, counted_BS))
        return hidden[1:]

    def losses(
        self,
        hidden: Sequence[Tensor],
        labels_BS: Tensor,
        ahead_labels_BKS: Tensor,
        output: Callable[..., Tensor],
    ) -> Tensor:
        """The decoder's loss, whose backward is that of the depths' losses too.

        The forward adds those to `loss_sum`: nothing after the blocks is ever recomputed.

        Args:
            hidden: x_BSD of the decoder and of each depth.
            output: the decoder's; one pass makes all losses.
        """
        factors = (1.0, *[self.loss_weight] * len(self.layers))
        labels = torch.cat([labels_BS, *ahead_labels_BKS.unbind(1)])
        return output(torch.cat(list(hidden)), labels, factors, self.loss_sum)
