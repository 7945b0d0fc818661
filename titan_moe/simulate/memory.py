"""What a run keeps in a GPU's memory, by arithmetic. No torch.

An estimate for layouts without a pipeline, and for experts that get equally many tokens. Peaks that
do not quite meet (the logits', one layer's backward) are added; what CUDA, NCCL and a fragmented
allocator take, about 5 GiB, is not.
"""

from dataclasses import astuple, dataclass

from titan_moe.config.job_config import ActivationCheckpoint, Parallelism, Training
from titan_moe.models.config import LOSS_CHUNKS, ModelConfig
from titan_moe.models.stats import Size, attention_stats, part_sizes

GIB = 2**30
_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    stored: float
    """This rank's shard of weights, gradients and AdamW's two moments."""
    gathered: float
    """Of the largest layer and the output layer: weights of two units, and gradients of one before
    and while they are reduced."""
    kept: float
    """What the forward leaves for the backward."""
    layer: float
    """The recomputed values of one layer, and their gradients."""
    logits: float
    """Of one chunk of the loss, and the output layer's gradients, which stand from there on."""
    host: float
    """Bytes in the host's memory for each GPU, which `stored` has moved to."""

    @property
    def total(self) -> float:
        """On the GPU."""
        return self.stored + self.gathered + self.kept + self.layer + self.logits

    def __str__(self) -> str:
        """One line, in GiB."""
        names = ("stored", "gathered", "kept", "one layer", "logits")
        terms = [f"{n} {b / GIB:.1f}" for n, b in zip(names, astuple(self), strict=False)]
        host = f"; in the host's memory {self.host / GIB:.1f}" if self.host else ""
        return f"{' + '.join(terms)} = {self.total / GIB:.1f}{host}"


def memory(
    config: ModelConfig,
    training: Training,
    parallelism: Parallelism,
    recompute: ActivationCheckpoint,
    world_size: int,
) -> Memory:
    """The estimate for one rank. Raises ValueError for a pipeline, which is not counted yet."""
    if parallelism.pipeline_parallel_degree > 1:
        degree = parallelism.pipeline_parallel_degree
        raise ValueError(
            f"parallelism.pipeline_parallel_degree={degree}: not counted yet: choose 1"
        )
    tp, cp = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    shards = world_size // parallelism.data_parallel_replicate_degree
    wide = _BYTES[training.dtype]
    compute = _BYTES["float64"] if wide == 8 else _BYTES[training.mixed_precision_param]
    parts = part_sizes(config)
    stored = sum(sum(size) for size in parts.values()) * 4 * wide / shards

    def whole(size: Size) -> float:
        experts = parallelism.expert_parallel_degree * parallelism.expert_tensor_parallel_degree
        return size.dense / tp + size.routed / experts

    reduced = max(wide, 4)
    layer = max(whole(size) for name, size in parts.items() if name.startswith("layers."))
    tokens = training.local_batch_size * training.seq_len / cp
    values = tokens * _values_per_token(config) / tp * compute
    vocabulary = config.vocab_size / tp
    chunk = training.loss_chunk_size
    whole_part = LOSS_CHUNKS["cuda"] if chunk is None else chunk or tokens
    # Logits, whose place their gradients take.
    logits = min(tokens, whole_part) * vocabulary * compute
    # Of the stream as the output layer sees it, gathered, and of its weight, added up wide.
    logits += tokens * (1 + config.num_mtp_layers) * config.dim * compute
    logits += vocabulary * config.dim * (reduced + compute)
    offload = training.enable_cpu_offload
    return Memory(
        stored=0.0 if offload else stored,
        gathered=layer * (3 * compute + reduced) + whole(parts["output"]) * (2 * compute + reduced),
        kept=_kept(config, parallelism, recompute, tokens / tp * compute),
        layer=2 * values,
        logits=logits,
        host=stored if offload else 0.0,
    )


def _kept(
    config: ModelConfig, parallelism: Parallelism, recompute: ActivationCheckpoint, bytes_: float
) -> float:
    """A recomputed layer keeps its input, one recomputed by operation what those return, another
    all its values. `bytes_`: of one value of every token."""
    num_layers = config.num_layers + config.num_mtp_layers
    values = _values_per_token(config)
    if recompute.mode == "none":
        return num_layers * values * bytes_
    if recompute.mode == "full":
        return num_layers * config.dim * bytes_
    if recompute.selective_ac_option == "op":
        return num_layers * _results_per_token(config, parallelism) * bytes_
    recomputed = -(-num_layers // int(recompute.selective_ac_option))
    return (recomputed * config.dim + (num_layers - recomputed) * values) * bytes_


def _values_per_token(config: ModelConfig) -> float:
    """Elements that one token's forward through the largest layer leaves for the backward."""
    own = attention_stats(config.attention, config.dim).saved
    # Gate, up, silu(gate) and their product.
    feed_forward = 4.0 * config.hidden_dim if _has_dense_layer(config) else 0.0
    if moe := config.moe:
        # Of a routed row x, gate and up: the rest is made again.
        routed = moe.top_k * (config.dim + 2 * moe.hidden_dim)
        shared = 4 * moe.num_shared_experts * moe.hidden_dim
        feed_forward = max(feed_forward, routed + shared)
    # Both norms' outputs and both sums with the stream.
    return 4 * config.dim + own + feed_forward


def _results_per_token(config: ModelConfig, parallelism: Parallelism) -> float:
    """Elements that recomputation by operation keeps of a token in the largest layer: the layer's
    input, attention with all it keeps, the results of products, and of the rows' two journeys."""
    own = attention_stats(config.attention, config.dim).results
    feed_forward = 2.0 * config.hidden_dim + config.dim if _has_dense_layer(config) else 0.0
    if moe := config.moe:
        journeys = 2 * config.dim if parallelism.expert_parallel_degree > 1 else 0
        routed = moe.top_k * (2 * moe.hidden_dim + config.dim + journeys)
        shared = 2 * moe.num_shared_experts * moe.hidden_dim
        feed_forward = max(feed_forward, routed + shared + config.dim * (shared > 0))
    return 2 * config.dim + own + feed_forward


def _has_dense_layer(config: ModelConfig) -> bool:
    return not all(map(config.is_moe_layer, range(config.num_layers)))
