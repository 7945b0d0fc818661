"""Sizes and costs of a decoder by arithmetic: parameters, FLOPs, saved elements. No torch.

Pipelines split by FLOPs, MFU counts them, the memory estimate adds up sizes.
"""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache, singledispatch
from typing import NamedTuple

from titan_moe.models.config import (
    CompressedConfig,
    GQAConfig,
    IndexerConfig,
    MLAConfig,
    ModelConfig,
    TokenMixer,
)
from titan_moe.models.recurrent_config import GatedDeltaConfig, Mamba2Config, RecurrentConfig
from titan_moe.ops.local_attention import LocalAttention, mean_seen


class AttentionStats(NamedTuple):
    """Holds sizes and costs of one layer's attention or recurrence."""

    parameters: int
    matrices: int
    """Parameters that each token is multiplied with."""
    saved: int
    """Elements of a token that its forward leaves for the backward."""
    results: int
    """Elements of a token that recomputation by operation keeps: products, and attention with all
    that it saves."""
    score_channels: int = 0
    """Multiplications of a token with each token that it sees: its scores, and their values."""
    state_products: int = 0
    """Multiplications of a token with a recurrent state."""
    index_channels: int = 0
    """Multiplications of a token with each token whose key an indexer scores."""
    top_k: int | None = None
    """The most tokens, or blocks, that a token sees; None: all that causal order leaves."""
    ratio: int = 0
    """Tokens of a block, whose one key is seen beside the window's; 0: there are no blocks."""
    query_sums: int = 0
    """Elements of a token's query gradients that FlashAttention's backward adds up in float32, with
    heads as wide as its tiles (`dq_accum` of ATen's mha_varlen_bwd); 0 for other kernels."""
    expanded: int = 0
    """Elements of a token's key and value gradients, one head for each query head, before that
    backward adds groups of them up (`dk_expanded`, `dv_expanded`); 0 without groups."""


@singledispatch
def attention_stats(attention: TokenMixer, dim: int) -> AttentionStats:
    """Returns the counts of one layer's attention for a residual stream of `dim`. Raises TypeError
    for a variant that has registered none."""
    raise TypeError(f"models/stats.py has no counts for a {type(attention).__name__}")


@attention_stats.register
def _(attention: GQAConfig, dim: int) -> AttentionStats:
    heads, kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    v_dim, by_channel = attention.v_dim, attention.gate == "channels"
    queries = heads * (1 + by_channel) * head_dim
    keys, own_values = kv_heads * head_dim, kv_heads * v_dim * (not attention.shares_kv)
    matrices = dim * (queries + keys + own_values + heads * v_dim)
    matrices += dim * heads * (attention.gate == "heads")
    biases = attention.bias * (queries + keys + own_values + attention.output_bias * dim)
    normed_heads = {"learned": 2, "across_heads": heads + kv_heads}
    norms = normed_heads.get(attention.qk_norm, 0) * head_dim
    flash = not attention.sinks  # Flex attention, which sinks take, adds up in registers.
    return AttentionStats(
        parameters=matrices + biases + norms + attention.sinks * heads,
        matrices=matrices,
        score_channels=heads * (head_dim + v_dim),
        saved=(2 * heads + 2 * kv_heads) * head_dim
        + (heads * (1 + 2 * by_channel) + kv_heads * (1 + attention.v_norm)) * v_dim,
        results=2 * kv_heads * (head_dim + v_dim) + 2 * heads * v_dim + queries,
        query_sums=flash * heads * _tiled(head_dim),
        expanded=flash * (heads != kv_heads) * heads * (head_dim + v_dim),
    )


def _tiled(head_dim: int) -> int:
    """Returns the dim of a head in FlashAttention's backward (`head_size_rounded`)."""
    tile = 32 if head_dim <= 128 else 64
    return -(-head_dim // tile) * tile


@attention_stats.register
def _(attention: MLAConfig, dim: int) -> AttentionStats:
    heads, nope_dim, v_dim = attention.num_heads, attention.nope_dim, attention.v_dim
    qk_dim, kv_rank, q_rank = attention.qk_dim, attention.kv_rank, attention.q_rank
    latent = kv_rank + attention.rope_dim
    matrices = dim * latent + kv_rank * heads * (nope_dim + v_dim) + heads * v_dim * dim
    matrices += dim * heads * qk_dim if q_rank is None else q_rank * (dim + heads * qk_dim)
    norms = kv_rank + (q_rank or 0)
    biases = attention.bias * (latent + dim + (q_rank or 0))
    by_head = 3 * qk_dim + nope_dim
    own = AttentionStats(
        parameters=matrices + norms + biases,
        matrices=matrices,
        score_channels=heads * (qk_dim + v_dim),
        # Fused kernels have one dim of heads, so that values and the output are padded.
        saved=heads * (4 * qk_dim + v_dim) + 2 * (kv_rank + (q_rank or 0)),
        results=heads * (by_head + 3 * v_dim) + latent + (q_rank or 0),
        query_sums=heads * _tiled(qk_dim),
    )
    return own if attention.indexer is None else _indexed(own, attention.indexer, dim, q_rank or 0)


def _indexed(own: AttentionStats, indexer: IndexerConfig, dim: int, q_rank: int) -> AttentionStats:
    """Adds an indexer's costs. Its loss makes gradients early: they are kept beside its tensors."""
    top_k = None if indexer.warm_up else indexer.top_k
    if indexer.shares:
        return own._replace(top_k=top_k, query_sums=0)
    queries, key, heads = indexer.num_heads * indexer.head_dim, indexer.head_dim, indexer.num_heads
    matrices = q_rank * queries + dim * (key + heads)
    kept = 2 * queries + 4 * key + 3 * heads
    return own._replace(
        parameters=own.parameters + matrices + 2 * key,
        matrices=own.matrices + matrices,
        saved=own.saved + kept,
        results=own.results + kept,
        index_channels=queries,
        top_k=top_k,
        query_sums=0,
    )


@attention_stats.register
def _(attention: CompressedConfig, dim: int) -> AttentionStats:
    channels, rank, indexer = attention.head_dim, attention.query_rank, attention.indexer
    heads, low = attention.num_heads * channels, attention.output_groups * attention.output_rank
    matrices = dim * (rank + channels + low) + heads * (rank + attention.output_rank)
    norms, width, queries = rank + channels, 0, 0
    if attention.ratio:
        width = channels * (2 if indexer else 1)
        matrices, norms = matrices + (2 * dim + attention.ratio) * width, norms + channels
    if indexer is not None:
        queries = indexer.num_heads * indexer.head_dim
        matrices += rank * queries + dim * indexer.num_heads
        matrices += (2 * dim + attention.ratio) * 2 * indexer.head_dim
        norms += indexer.head_dim
    return AttentionStats(
        parameters=matrices + norms + attention.num_heads,
        matrices=matrices,
        score_channels=2 * heads,
        # A head's channels get one more for the sinks, in queries and in the output.
        saved=5 * heads + 2 * attention.num_heads + 2 * rank + 3 * channels + low + 6 * width,
        results=4 * heads + rank + 2 * channels + low + 2 * width,
        index_channels=queries,
        top_k=None if indexer is None else indexer.top_k,
        ratio=attention.ratio,
    )


@attention_stats.register
def _(attention: GatedDeltaConfig, dim: int) -> AttentionStats:
    heads, rank = attention.num_value_heads, attention.gate_rank
    keys, values = attention.num_key_heads * attention.key_dim, heads * attention.value_dim
    convolved, rates = 2 * keys + values, heads if rank is None else keys
    # A convolution multiplies each channel's tokens with its weights.
    matrices = dim * (convolved + values + heads) + convolved * attention.conv_size
    matrices += dim * (values + rates) if rank is None else rank * (2 * dim + values + rates)
    # Rates of channels are kept in float32, twice, and take as much as two of the others.
    kept, narrow = (0, 0) if rank is None else (4 * rates, 2 * rank)
    return AttentionStats(
        parameters=matrices + heads + rates + attention.value_dim,
        matrices=matrices,
        saved=2 * convolved + 5 * values + kept + narrow,
        results=2 * convolved + 2 * values + heads + rates + narrow,
        # The state is read twice, by the key and by the query, and written once.
        state_products=3 * values * attention.key_dim,
    )


@attention_stats.register
def _(attention: Mamba2Config, dim: int) -> AttentionStats:
    heads = attention.num_value_heads
    keys, values = attention.num_key_heads * attention.key_dim, heads * attention.value_dim
    convolved = 2 * keys + values
    matrices = dim * (convolved + 2 * values + heads) + convolved * attention.conv_size
    return AttentionStats(
        parameters=matrices + attention.conv_bias * convolved + 3 * heads + values,
        matrices=matrices,
        # Time steps and decays are float32, and take as much as two each.
        saved=2 * convolved + 3 * values + 8 * heads,
        results=2 * convolved + 2 * values + heads,
        # The state is read once and written once.
        state_products=2 * values * attention.key_dim,
    )


def flash_workspace(mixer: TokenMixer, dim: int, width: int) -> float:
    """Returns the bytes of a token beside the gradients in the backward of FlashAttention, which
    takes no type wider than 2 bytes; cuDNN's workspace is alike. `width`: bytes of an element."""
    stats = attention_stats(mixer, dim)
    return 4 * stats.query_sums + width * stats.expanded if width == 2 else 0


class Size(NamedTuple):
    """Parameters of a part: those that every token meets, and those of all routed experts."""

    dense: int
    routed: int = 0

    def active(self, config: ModelConfig) -> float:
        """Returns the number of parameters that a token meets, with top_k of the routed experts."""
        moe = config.moe
        return self.dense + (self.routed * moe.top_k / moe.num_experts if moe else 0.0)


@lru_cache(maxsize=64)
def part_sizes(config: ModelConfig) -> Mapping[str, Size]:
    """Returns the sizes of all parts in the model's order: "tok_embeddings", "layers.0", ...,
    "norm", "output", and "mtp" where there is multi-token prediction.

    Copies of tied weights count: each is stored, with its gradient and optimizer state.
    """
    embedding = config.vocab_size * config.dim
    parts = {"tok_embeddings": Size(embedding)}
    parts |= {f"layers.{layer}": _layer_size(config, layer) for layer in range(config.num_layers)}
    collapse = config.streams * (config.streams * config.dim + 1) + 1
    parts["norm"] = Size(config.dim + collapse * (config.streams > 1))
    parts["output"] = Size(embedding)
    if config.num_mtp_layers:
        blocks = [_layer_size(config, config.num_layers + k) for k in range(config.num_mtp_layers)]
        around = config.num_mtp_layers * (embedding + 2 * config.dim**2 + 3 * config.dim)
        dense, routed = (sum(numbers) for numbers in zip(*blocks, strict=True))
        parts["mtp"] = Size(around + dense, routed)
    return parts


def total(config: ModelConfig) -> Size:
    """Returns the published model's size: without multi-token prediction, tied weights once."""
    parts = dict(part_sizes(config))
    parts.pop("mtp", None)
    if config.tied_embeddings:
        del parts["output"]
    return Size(sum(p.dense for p in parts.values()), sum(p.routed for p in parts.values()))


@lru_cache(maxsize=64)
def part_flops(config: ModelConfig, seq_len: int = 4096) -> Mapping[str, float]:
    """Returns the FLOPs of one token's forward in each part, in the model's order.

    Keys: "tok_embeddings" and "norm", which multiply no matrices and cost 0, "layers.0", ... and
    "output". A parameter that a token is multiplied with costs 2 FLOPs; of routed experts only the
    active ones count. Attention counts the pairs that a token sees in causal order over `seq_len`
    tokens, within the layer's window, chunk or selection; an indexer counts all pairs in causal
    order. "output" includes multi-token prediction, which its stage computes.
    """
    first = config.num_layers
    numbers = range(first + config.num_mtp_layers)
    flops = [2.0 * sum(layer_products(config, n, seq_len)) for n in numbers]
    layers = {f"layers.{layer}": each for layer, each in enumerate(flops[:first])}
    logits = 2.0 * config.dim * config.vocab_size
    ahead = [2.0 * 2 * config.dim**2 + each + logits for each in flops[first:]]
    return {"tok_embeddings": 0.0, **layers, "norm": 0.0, "output": logits + sum(ahead)}


@lru_cache(maxsize=1024)
def kinds_of_layers(config: ModelConfig, modules: tuple[str, ...]) -> Mapping[int, int]:
    """Returns for each kind of layer among some modules its first layer in the model, and how many
    there are; layers of multi-token prediction go with the output."""
    layers = [int(name.removeprefix("layers.")) for name in modules if name.startswith("layers.")]
    if "output" in modules:
        layers += range(config.num_layers, config.num_layers + config.num_mtp_layers)
    return Counter(_first_of_kind(config)[layer] for layer in layers)


@lru_cache(maxsize=64)
def _first_of_kind(config: ModelConfig) -> tuple[int, ...]:
    """Returns for each layer the first one with the same parts."""
    kinds: dict[object, int] = {}
    return tuple(
        kinds.setdefault((config.mixer(n), config.is_moe_layer(n), config.is_dense_layer(n)), n)
        for n in range(config.num_layers + config.num_mtp_layers)
    )


class Products(NamedTuple):
    """Multiplications of a token in one layer's forward."""

    dense: float = 0.0
    """With parameters that every token meets."""
    routed: float = 0.0
    """With its top_k experts."""
    mixing: float = 0.0
    """With other tokens, or with a recurrent state."""


@lru_cache(maxsize=4096)
def layer_products(config: ModelConfig, layer: int, seq_len: int) -> Products:
    """Returns the multiplications of a layer; layers of multi-token prediction follow the last."""
    mixer, moe, (matrices, routed) = config.mixer(layer), config.moe, _matrices(config)
    dense = experts = mixing = 0.0
    if mixer is not None:
        dense, mixing = attention_stats(mixer, config.dim).matrices, _mixing(mixer, config, seq_len)
    if (streams := config.streams) > 1:  # Two projections of all streams; and they are mixed.
        dense += 2 * streams * (streams + 2) * (streams + 1) * config.dim
    if config.is_dense_layer(layer):
        dense += matrices * config.dim * config.hidden_dim
    if moe is not None and config.is_moe_layer(layer):
        gates, latent = moe.num_experts + moe.shared_gate, 2 * (moe.latent_dim or 0)
        shared = matrices * moe.num_shared_experts * moe.hidden_dim
        dense += config.dim * (gates + latent + shared)
        experts = routed * config.row_dim * moe.top_k * moe.hidden_dim
    return Products(dense, experts, mixing)


def _mixing(mixer: TokenMixer, config: ModelConfig, seq_len: int) -> float:
    local = None if isinstance(mixer, RecurrentConfig) else mixer.local
    seen, attention = mean_seen(local, seq_len), attention_stats(mixer, config.dim)
    keys = seq_len // attention.ratio if attention.ratio else seq_len
    past = mean_seen(None, max(keys, 1)) if attention.ratio else seen
    products = attention.index_channels * past + attention.state_products
    if attention.top_k is not None:  # As many pairs as a window of this size leaves.
        past = mean_seen(LocalAttention("window", attention.top_k), max(keys, 1))
    seen = seen + past if attention.ratio else past
    return products + attention.score_channels * seen


def _layer_size(config: ModelConfig, layer: int) -> Size:
    mixer, moe, matrices = config.mixer(layer), config.moe, _matrices(config)
    is_dense, experts = config.is_dense_layer(layer), config.is_moe_layer(layer)
    norms = (mixer is not None) + (is_dense or experts) + (is_dense and experts)
    norms += config.sandwich_norms * (norms + (is_dense and experts))
    dense = norms * config.dim + is_dense * matrices.dense * config.dim * config.hidden_dim
    if mixer is not None:
        dense += attention_stats(mixer, config.dim).parameters
    rows = config.streams * (config.streams + 2)
    dense += 2 * (rows * config.streams * config.dim + rows + 3) * (config.streams > 1)
    if moe is None or not experts:
        return Size(dense)
    dense += moe.num_experts * (config.dim + moe.router_bias) + moe.shared_gate * config.dim
    dense += (moe.stream_eps is not None) * (config.dim + moe.num_experts)
    dense += matrices.dense * config.dim * moe.num_shared_experts * moe.hidden_dim
    dense += 2 * config.dim * (moe.latent_dim or 0)
    biases = moe.projection_bias * ((matrices.routed - 1) * moe.hidden_dim + config.row_dim)
    expert = matrices.routed * config.row_dim * moe.hidden_dim + biases
    return Size(dense, moe.num_experts * expert)


def _matrices(config: ModelConfig) -> Size:
    """Returns the projections of a dense feed-forward or shared expert, and of a routed expert."""
    moe = config.moe
    return Size(2 + config.activation.gated, 2 + moe.activation.gated if moe else 0)
