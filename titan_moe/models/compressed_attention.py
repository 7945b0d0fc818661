"""Attention of DeepSeek-V4: a window of tokens beside blocks of tokens that are compressed.

There is one head of keys, which are the values too. A block of a document's tokens makes one key
when its last token is there; the tokens after the last whole block make none. Blocks are counted
from where a document begins, so that packed documents stay apart. A selection has no gradient.

The price: an explicit mask of all pairs, and each key's block is gathered anew in each layer.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.models.attention import Attention, PerHead, build_attention
from titan_moe.models.config import CompressedConfig, IndexerConfig, ModelConfig
from titan_moe.models.indexer import BestKeys
from titan_moe.models.output import norm_of
from titan_moe.models.rope import Rotation, rotate
from titan_moe.moe.decisions import DecisionMemo
from titan_moe.ops.attention import AttentionCore
from titan_moe.ops.operation import at_least_float32
from titan_moe.ops.sparse_attention import index_scores, unpack_keys


class Blocks(NamedTuple):
    """Places of the J blocks that a sequence can have at most, earliest first."""

    tokens_BJW: Tensor
    """Numbers of the tokens that make a block's key, its own last."""
    inside_BJW: Tensor
    """False for tokens before the document."""
    rotation: Rotation
    """Angles of each block's first own token."""
    seen_BSJ: Tensor
    """Blocks of its document that each token may see: they end before it, or at it."""


def blocks_of(rotation: Rotation, ratio: int, *, overlaps: bool) -> Blocks:
    """Returns the blocks of `ratio` tokens, given the positions of tokens in their documents.
    Blocks that overlap are compressed from the tokens of the block before, too."""
    places_BS = rotation.positions_BS
    numbers_S = torch.arange(places_BS.shape[1], device=places_BS.device)
    ends_BS = places_BS % ratio == ratio - 1
    in_order_BS = ends_BS.logical_not().byte().sort(dim=1, stable=True).indices
    last_BJ = in_order_BS[:, : max(len(numbers_S) // ratio, 1)]
    back_W = torch.arange(1 - ratio * (1 + overlaps), 1, device=places_BS.device)
    tokens_BJW = (last_BJ[..., None] + back_W).clamp_min(0)
    inside_BJW = places_BS.gather(1, last_BJ)[..., None] + back_W >= 0
    starts_BS = numbers_S - places_BS
    seen_BSJ = ends_BS.gather(1, last_BJ)[:, None] & (last_BJ[:, None] <= numbers_S[:, None])
    seen_BSJ = seen_BSJ & (starts_BS.gather(1, last_BJ)[:, None] == starts_BS[..., None])
    first_BJ = tokens_BJW[..., -ratio]
    cos, sin = _rows(rotation.cos_BSC, first_BJ), _rows(rotation.sin_BSC, first_BJ)
    own = Rotation(cos, sin, places_BS.gather(1, first_BJ))
    return Blocks(tokens_BJW, inside_BJW, own, seen_BSJ)


def _rows(x_BSC: Tensor, tokens: Tensor) -> Tensor:
    """Returns the rows of these tokens, [B, ..., C] of [B, ...]."""
    rows = x_BSC.gather(1, tokens.flatten(1)[..., None].expand(-1, -1, x_BSC.shape[-1]))
    return rows.unflatten(1, tokens.shape[1:])


def turned(x_BSHC: Tensor, rotation: Rotation) -> Tensor:
    """Rotates the last channels of each head."""
    first = x_BSHC.shape[-1] - 2 * rotation.cos_BSC.shape[-1]
    return rotate(x_BSHC, rotation, "neighbours", first)


class Compressor(nn.Module):
    """Makes the key of each block: by channel, a mean of its tokens' values with learned weights.

    Overlapping blocks have values and weights of their own for the tokens of the block before: the
    first channels of both projections, and of `bias`, which is added to the weights' logits.
    """

    def __init__(self, channels: int, attention: CompressedConfig, config: ModelConfig) -> None:
        super().__init__()
        self.parts = 1 + (attention.indexer is not None)
        self.wkv = nn.Linear(config.dim, self.parts * channels, bias=False)
        self.wgate = nn.Linear(config.dim, self.parts * channels, bias=False)
        self.bias = nn.Parameter(torch.empty(attention.ratio, self.parts * channels))
        self.norm = norm_of(config)(channels)

    def forward(self, x_BSD: Tensor, blocks: Blocks) -> Tensor:
        """Returns keys_BJC."""

        def by_block(x_BSE: Tensor) -> Tensor:
            pairs = zip(self._cut(x_BSE), self._cut(blocks.tokens_BJW), strict=True)
            return torch.cat([_rows(*pair) for pair in pairs], 2)

        logits_BJWC = by_block(self.wgate(x_BSD)) + torch.cat(self._cut(self.bias))
        logits_BJWC = logits_BJWC.to(at_least_float32(x_BSD))
        logits_BJWC = logits_BJWC.masked_fill(~blocks.inside_BJW[..., None], -torch.inf)
        weights_BJWC = logits_BJWC.softmax(2).to(x_BSD.dtype)
        keys_BJC = self.norm((by_block(self.wkv(x_BSD)) * weights_BJWC).sum(2))
        return turned(keys_BJC[:, :, None], blocks.rotation)[:, :, 0]

    def _cut(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(self.parts, -1)


class BlockIndexer(nn.Module):
    """Selects the blocks that each query sees, by keys of their own. It does not train: a selection
    has no gradient."""

    def __init__(
        self, indexer: IndexerConfig, attention: CompressedConfig, config: ModelConfig
    ) -> None:
        super().__init__()
        self.config, queries = indexer, indexer.num_heads * indexer.head_dim
        self.wq_b = nn.Linear(attention.query_rank, queries, bias=False)
        self.weights_proj = nn.Linear(config.dim, indexer.num_heads, bias=False)
        self.compressor = Compressor(indexer.head_dim, attention, config)
        self.select: nn.Module = BestKeys(indexer.top_k)
        self.memo = DecisionMemo()

    @torch.no_grad()
    def forward(
        self, x_BSD: Tensor, q_latent_BSR: Tensor, rotation: Rotation, blocks: Blocks
    ) -> Tensor:
        """Returns the blocks that each query sees, [B, S, J] bool."""
        config, seen_BSJ = self.config, blocks.seen_BSJ
        q_BSHC = self.wq_b(q_latent_BSR).unflatten(-1, (-1, config.head_dim))
        scale = (config.num_heads * config.head_dim) ** -0.5
        weights_BSH = self.weights_proj(x_BSD).to(at_least_float32(x_BSD)) * scale
        keys_BJC = self.compressor(x_BSD, blocks)
        scores_BSJ = index_scores(turned(q_BSHC, rotation), keys_BJC, weights_BSH)
        scores_BSJ = scores_BSJ.masked_fill_(~seen_BSJ, -torch.inf)
        return unpack_keys(self.memo.decide(self.select, scores_BSJ), seen_BSJ.shape[-1]) & seen_BSJ


@build_attention.register(CompressedConfig)
class CompressedAttention(Attention):
    """Multi-query attention with sinks, to a window of tokens and to blocks that ended before the
    query. As values are rotated keys, the output is rotated back. `core` takes an explicit mask."""

    def __init__(
        self, attention: CompressedConfig, config: ModelConfig, core: AttentionCore
    ) -> None:
        super().__init__()
        self.config, self.core, make_norm = attention, core, norm_of(config)
        dim, rank, channels = config.dim, attention.query_rank, attention.head_dim
        heads, self.eps = attention.num_heads * channels, config.norm_eps
        self.wq_a, self.q_norm = nn.Linear(dim, rank, bias=False), make_norm(rank)
        self.wq_b = nn.Linear(rank, heads, bias=False)
        self.wkv, self.kv_norm = nn.Linear(dim, channels, bias=False), make_norm(channels)
        self.sinks = PerHead(attention.num_heads)
        groups, low = attention.output_groups, attention.output_groups * attention.output_rank
        self.wo_a = PerHead(low, heads // groups)  # Projects each group's channels by itself.
        self.wo = nn.Linear(low, dim, bias=False)
        own, indexer = (attention, config), attention.indexer
        self.compressor = Compressor(channels, *own) if attention.ratio else None
        self.indexer = BlockIndexer(indexer, *own) if indexer else None

    def forward(
        self, x_BSD: Tensor, rotation: Rotation, mask: Any, counted_BS: Tensor | None = None
    ) -> Tensor:
        channels = self.config.head_dim
        q_latent_BSR = self.q_norm(self.wq_a(x_BSD))
        q_BSHC = self.wq_b(q_latent_BSR).unflatten(-1, (-1, channels))
        q_BSHC = turned(F.rms_norm(q_BSHC, (channels,), None, self.eps), rotation)
        k_BT1C = turned(self.kv_norm(self.wkv(x_BSD))[:, :, None], rotation)
        if self.compressor is not None:
            overlaps = self.indexer is not None
            blocks = blocks_of(rotation, self.config.ratio, overlaps=overlaps)
            k_BT1C = torch.cat([k_BT1C, self.compressor(x_BSD, blocks)[:, :, None]], 1)
            seen_BSJ = blocks.seen_BSJ
            if self.indexer is not None:
                seen_BSJ = self.indexer(x_BSD, q_latent_BSR, rotation, blocks)
            mask = torch.cat([mask.expand(len(x_BSD), -1, -1, -1), seen_BSJ[:, None]], -1)
        q_BHSC, k_B1TC = q_BSHC.transpose(1, 2), k_BT1C.transpose(1, 2)
        args = q_BHSC, k_B1TC, k_B1TC, mask, channels**-0.5, self.sinks()
        o_BSHC = self.attend(self.core, *args).transpose(1, 2)
        back = rotation._replace(sin_BSC=-rotation.sin_BSC)
        groups = self.config.output_groups, -1
        o_BSGC = turned(o_BSHC, back).flatten(2).unflatten(2, groups)
        weight_GRC = self.wo_a().unflatten(0, groups)
        return self.wo(torch.einsum("bsgc,grc->bsgr", o_BSGC, weight_GRC).flatten(2))
