"""Counts the elements of one token that layers keep for the backward, by arithmetic. Imports no
torch.

They are the tensors that `models/attention.py`, `moe/experts.py` and `ops` save. Tests compare them
with what lives in a forward.
"""

from functools import lru_cache
from typing import NamedTuple

from titan_moe.models.config import CompressedConfig, ModelConfig
from titan_moe.models.recurrent_config import RecurrentConfig
from titan_moe.models.stats import attention_stats, flash_workspace
from titan_moe.moe.config import places_reached
from titan_moe.ops.activation import SWIGLU
from titan_moe.parallelize.plan import BYTES, Plan

Lines = dict[str, float]
"""Bytes, or elements, by what takes them."""
# FlashAttention's backward has sums for so many more tokens after each sequence.
_PADDING = 128
# Float32 values of a pair of tokens that sparse attention has at once.
_PAIR_MATRICES = 6


@lru_cache(maxsize=1024)
def values_per_token(
    config: ModelConfig, layer: int, rows: float = 1.0, slices: int = 1, tp: int = 1
) -> Lines:
    """Elements that one token's forward through a layer leaves for the backward.

    Args:
        rows: those of the rank's experts, as a multiple of an even share.
        slices: etp cuts each expert into so many, each of which has all of its rows.
        tp: each of so many ranks has the inputs of attention and of dense products whole.
    """
    attention, routed, fed = 0.0, 0.0, 0.0
    if (mixer := config.mixer(layer)) is not None:
        attention = attention_stats(mixer, config.dim).saved
    is_moe, is_dense = config.is_moe_layer(layer), config.is_dense_layer(layer)
    # Gate, up and the rows of the last product; of plain SwiGLU silu(gate) too.
    activation = config.activation.of(layer)
    dense = 2 + activation.gated + (activation == SWIGLU)
    if is_dense:
        fed += dense * config.hidden_dim
    if is_moe and (moe := config.moe):
        # x, gate and up of a routed row are kept, the sum of a latent's rows; the rest is computed
        # again.
        row = slices * config.row_dim + (1 + moe.activation.gated) * moe.hidden_dim
        routed += rows * moe.top_k * row + (moe.latent_dim or 0)
        fed += dense * moe.num_shared_experts * moe.hidden_dim
    # Both norms' outputs and both sums with the stream; norms after them keep what they read.
    sublayers = (mixer is not None) + (is_moe or is_dense)
    norms = sublayers * (2 + config.sandwich_norms) + 5 * (is_moe and is_dense)
    is_shared = is_moe and config.moe is not None and config.moe.num_shared_experts > 0
    norms += (tp - 1) * ((mixer is not None) + (is_dense or is_shared))
    if config.streams > 1:  # Streams and their norm, in float32, and what both sublayers add.
        norms += 12 * config.streams
    own = {"norms and sums": norms * config.dim, "attention": attention}
    return own | {"experts": routed, "feed-forward": fed}


def results_per_token(plan: Plan, layer: int, rows: float) -> Lines:
    """Elements that recomputation by operation keeps of a token in a layer: the layer's input,
    attention with all it keeps, the results of products, and the exchanged rows."""
    config, attention, fed = plan.config, 0.0, 0.0
    if (mixer := config.mixer(layer)) is not None:
        attention = attention_stats(mixer, config.dim).results
    first = 1 + config.activation.gated
    if config.is_dense_layer(layer):
        fed += first * config.hidden_dim + config.dim
    if config.is_moe_layer(layer) and (moe := config.moe):
        row = (1 + moe.activation.gated) * moe.hidden_dim + plan.dims.etp * config.row_dim
        fed += rows * moe.top_k * row + exchanged_per_token(plan, rows)
        if moe.latent_dim is not None:  # The results of both maps.
            fed += moe.latent_dim + config.dim
        shared = first * moe.num_shared_experts * moe.hidden_dim
        fed += shared + config.dim * (shared > 0)
    return {"norms and sums": 2.0 * config.dim, "attention": attention, "feed-forward": fed}


def exchanged_per_token(plan: Plan, rows: float) -> float:
    """Elements of a token's rows that arrive at its experts' ranks, at each that has a slice; with
    the deduplicating dispatcher, at as many ranks as a balanced router draws, at most at all."""
    moe, ranks, slices = plan.config.moe, plan.dims.ep, plan.dims.etp
    if moe is None or ranks * slices == 1:
        return 0.0
    once = min(rows * places_reached(moe.top_k, ranks), ranks)
    deduplicates = plan.dispatch.name == "deduplicated"
    return slices * (once if deduplicates else rows * moe.top_k) * plan.config.row_dim


class LayerValues(NamedTuple):
    """Elements of one token in a layer."""

    values: Lines
    """All that its backward needs."""
    recomputed: Lines
    """Elements that stay between forward and backward if the layer is recomputed."""
    others: Lines
    """Elements that stay if it is not recomputed."""
    in_feed_forward: Lines
    """Elements that its backward has besides in the feed-forward."""
    in_attention: Lines
    """Elements that its backward has besides in attention, when the feed-forward's are gone."""


def layer_values(
    plan: Plan, layer: int, rows: float, *, hidden_rows: bool, joined: float = 0.0
) -> LayerValues:
    """Returns the elements of a layer.

    A recomputed layer keeps its input and maybe the exchanged rows, one recomputed by operation
    what those return, another all its values. Backward, a feed-forward has gradients of the
    experts' values or of the others', or two copies of the rows that go home.

    Args:
        rows: those of the rank's experts, as a multiple of an even share.
        hidden_rows: the rows before the experts' last product are kept, for adapters.
        joined: elements of experts' weights, a rank's own and borrowed ones, for each token.
    """
    config, training = plan.config, plan.job.training
    recompute, mixer = plan.job.activation_checkpoint, config.mixer(layer)
    moe = config.moe if config.is_moe_layer(layer) else None
    values = dict(values_per_token(config, layer, rows, plan.dims.etp, plan.dims.tp))
    more: Lines = {}
    stream = float(config.dim * config.streams)
    recomputed = {"inputs": stream}
    if hidden_rows and moe:
        more["rows before the experts' last product"] = rows * moe.top_k * moe.hidden_dim
    pairs = 0.0
    if config.indexer is not None and mixer is not None:
        # Matrices of all pairs, whole on each rank of tp, and a mask that takes half a value a
        # pair; a recomputation replays a bit a pair.
        pairs = float(training.seq_len * plan.dims.tp)
        more["mask of pairs"], recomputed["bits of pairs"] = pairs / 2, pairs / 16
    if isinstance(mixer, CompressedConfig):  # No fused kernel takes its heads.
        more["scores of pairs"] = 2.0 * training.seq_len * mixer.num_heads
    if recompute.keep_exchanged_rows and moe:
        recomputed["exchanged rows"] = exchanged_per_token(plan, rows)
    if recompute.keep_attention and mixer is not None and not isinstance(mixer, RecurrentConfig):
        recomputed["attention"] = mixer.num_heads * mixer.qk_dim  # As wide as values, or more.
    fed = values["experts"], values["feed-forward"], joined if moe else 0.0
    copies = 2 * plan.dims.etp * rows * moe.top_k * config.row_dim if moe else 0.0
    workspace = 0.0
    if mixer is not None and plan.device_type == "cuda":
        width, padding = BYTES[plan.types.compute], _PADDING * plan.dims.cp / training.seq_len
        workspace = flash_workspace(mixer, config.dim, width) / width * (1 + padding)
    values |= more
    if fed[2]:  # Joined again in each recomputation.
        values["own and borrowed experts"] = joined
    return LayerValues(
        values,
        recomputed,
        results_per_token(plan, layer, rows) | more if recompute.by_operation else values,
        {
            "gradient of the stream": stream,
            "gradients of the feed-forward, or copies of rows": max(*fed, copies),
        },
        {
            "gradient of the stream": stream,
            "feed-forward, which is gone": -sum(fed),
            "gradients of attention": values["attention"],
            "sums in FlashAttention's backward": workspace,
            "matrices of pairs": _PAIR_MATRICES * 2 * pairs,
        },
    )
