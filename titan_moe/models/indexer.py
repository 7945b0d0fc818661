"""The lightning indexer: selects the keys that a layer's attention sees (arXiv 2512.02556, 2.1)."""

from functools import partial

import torch
from torch import Tensor, nn

from titan_moe.models.config import IndexerConfig
from titan_moe.models.output import LayerNorm
from titan_moe.models.rope import Rotation, rotate
from titan_moe.moe.balance import attach_loss
from titan_moe.moe.decisions import DecisionMemo
from titan_moe.ops.sparse_attention import Index, SharedKeys, select_keys


class Selection:
    """Holds the packed keys that were selected last; all layers of a decoder share one object.
    A recomputation selects none and leaves them as they are."""

    keys_BSW: Tensor | None = None


class BestKeys(nn.Module):
    """Selects the keys of each query with the largest scores."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k

    def forward(self, scores_BST: Tensor) -> Tensor:
        """Returns keys_BSW, as `select_keys` packs them."""
        return select_keys(scores_BST, self.top_k)

    def extra_repr(self) -> str:
        return str(self.top_k)


class Indexer(nn.Module):
    """Scores keys. Makes queries of several heads from the query's latent, and from the stream one
    key for all heads and the weight of each head.

    Its inputs are detached: its own loss trains its parameters and nothing else, and they get no
    other gradient. `select` picks keys by their scores; a replay of recorded keys takes its place.
    `memo` replays the selection in a recomputation.

    Buffer: `loss_sum` adds up this step's losses.
    """

    loss_sum: Tensor

    def __init__(self, dim: int, q_rank: int, config: IndexerConfig) -> None:
        super().__init__()
        self.config = config
        self.wq_b = nn.Linear(q_rank, config.num_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(dim, config.head_dim, bias=False)
        self.k_norm = LayerNorm(config.head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(dim, config.num_heads, bias=False)
        self.select: nn.Module = BestKeys(config.top_k)
        self.memo, self.selection = DecisionMemo(), Selection()
        self.register_buffer("loss_sum", torch.empty((), dtype=torch.float64), persistent=False)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Sets the values of a new run; called again when the module leaves `meta`."""
        self.loss_sum.zero_()

    def forward(
        self,
        x_BSD: Tensor,
        q_latent_BSR: Tensor,
        rotation: Rotation,
        counted_BS: Tensor | None = None,
    ) -> Index:
        """Args: the normed stream, attention's latent of its queries, the positions, and the
        queries whose loss counts; None: all."""
        config = self.config
        x_BSD, q_latent_BSR = x_BSD.detach(), q_latent_BSR.detach()
        q_BSHC = self.wq_b(q_latent_BSR).unflatten(-1, (-1, config.head_dim))
        k_BSHC = self.k_norm(self.wk(x_BSD))[:, :, None]
        q_BSHC, k_BSHC = (rotate(x, rotation, config.pairing) for x in (q_BSHC, k_BSHC))
        scale = (config.num_heads * config.head_dim) ** -0.5
        weights_BSH = self.weights_proj(x_BSD).to(rotation.cos_BSC.dtype) * scale
        return Index(
            q_BSHC,
            k_BSHC[:, :, 0],
            weights_BSH,
            None if config.warm_up else config.top_k,
            partial(self.memo.decide, self._select),
            partial(attach_loss, total=self.loss_sum) if self.training else None,
            counted_BS,
        )

    def _select(self, scores_BST: Tensor) -> Tensor:
        keys_BSW = self.selection.keys_BSW = self.select(scores_BST)
        return keys_BSW


class SharedSelection(nn.Module):
    """Replaces the indexer of a layer that has none: its attention sees the keys that the layers
    before selected for the same tokens. It has no loss."""

    def __init__(self, config: IndexerConfig) -> None:
        super().__init__()
        self.selects = not config.warm_up
        self.memo, self.selection = DecisionMemo(), Selection()

    def forward(self, x_BSD: Tensor, *_: object) -> SharedKeys:
        return SharedKeys(partial(self.memo.decide, self._last, x_BSD) if self.selects else None)

    def _last(self, _: Tensor) -> Tensor:
        assert self.selection.keys_BSW is not None, "no indexer has selected keys"
        return self.selection.keys_BSW
