"""Estimates by arithmetic what a run keeps in a GPU's memory. Imports no torch.

Experts are taken to get equally many tokens. Peaks that do not quite meet (the logits', one
layer's backward) are added. `RESERVED` stands for CUDA, NCCL and a fragmented allocator. A
pipeline's rank is counted with all its stages gathered, which is an upper bound. Nothing of it has
been compared with a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from titan_moe.config.job_config import ActivationCheckpoint, Parallelism, Training
from titan_moe.models.config import LOSS_CHUNKS, ModelConfig
from titan_moe.models.stats import Share, Size, attention_stats, shares_of_ranks
from titan_moe.moe.config import deduplication_pays, places_reached, rows_of_buffers

GIB = 2**30
RESERVED = 6 * GIB
"""Memory for CUDA and a fragmented allocator, about 3 GiB, and for NCCL's buffers, about as much
where eight ranks of a node exchange rows."""
_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    stored: float
    """This rank's shard of weights, gradients and AdamW's two moments."""
    gathered: float
    """Weights of two of the largest layers, gradients of one before and while they are reduced;
    weights and gradients of the output layer. Where experts are reduced apart, two reductions are
    under way."""
    kept: float
    """Values that the forward keeps for the backward; in a pipeline, of all microbatches between
    the two, and the buffers in which each microbatch arrives."""
    layer: float
    """The recomputed values of one layer, and their gradients."""
    logits: float
    """Logits of one chunk of the loss, and the output layer's gradients, which stay after it."""
    accumulated: float
    """Sums of gradients that are still to be reduced, and parameters that stay gathered, in a
    pipeline or with `parallelism.fsdp_accumulation="keep_gathered"`; else 0, also for "auto"."""
    exchange: float
    """Symmetric memory of the dispatcher that has some."""
    host: float
    """Bytes in the host's memory for each GPU, which `stored` has moved to."""

    @property
    def total(self) -> float:
        """On the GPU."""
        terms = (self.stored, self.gathered, self.kept, self.layer, self.logits)
        return sum(terms) + self.accumulated + self.exchange

    def __str__(self) -> str:
        """One line, in GiB; in MiB where the sum is below 1 GiB."""
        named = {
            "stored": self.stored,
            "gathered": self.gathered,
            "kept": self.kept,
            "one layer": self.layer,
            "logits": self.logits,
        }
        if self.accumulated:
            named["accumulated"] = self.accumulated
        if self.exchange:
            named["symmetric memory"] = self.exchange
        unit = GIB if self.unit == "GiB" else 2**20
        terms = [f"{name} {size / unit:.1f}" for name, size in named.items()]
        host = f"; in the host's memory {self.host / unit:.1f}" if self.host else ""
        return f"{' + '.join(terms)} = {self.total / unit:.1f}{host}"

    @property
    def unit(self) -> str:
        """The unit of the line."""
        return "GiB" if self.total + self.host >= GIB else "MiB"


def memory(
    config: ModelConfig,
    training: Training,
    parallelism: Parallelism,
    recompute: ActivationCheckpoint,
    world_size: int,
) -> Memory:
    """The estimate for one rank: in a pipeline, for the one that needs most.

    Raises ConfigError for a pipeline that this model cannot be cut into.
    """
    sections = (config, training, parallelism, recompute, world_size)
    shares = shares_of_ranks(config, training, parallelism)
    return max((_of_rank(*sections, share) for share in shares), key=lambda found: found.total)


def _of_rank(
    config: ModelConfig,
    training: Training,
    parallelism: Parallelism,
    recompute: ActivationCheckpoint,
    world_size: int,
    share: Share,
) -> Memory:
    tp, cp = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    pp = parallelism.pipeline_parallel_degree
    shards = world_size // (parallelism.data_parallel_replicate_degree * pp)
    wide = _BYTES[training.dtype]
    compute = _BYTES["float64"] if wide == 8 else _BYTES[training.mixed_precision_param]
    parts = share.parts
    stored = sum(sum(size) for size in parts.values()) * 4 * wide / shards

    def whole(size: Size) -> float:
        experts = parallelism.expert_parallel_degree * parallelism.expert_tensor_parallel_degree
        return size.dense / tp + size.routed / experts

    reduced = max(wide, 4)
    all_of_it = sum(whole(size) for size in parts.values())
    accumulated = 0.0
    if pp > 1 or parallelism.fsdp_accumulation == "keep_gathered":
        # The shards of gradients, which `stored` has, are made from these sums and free them.
        accumulated = all_of_it * (reduced + compute)
        accumulated -= 0.0 if training.enable_cpu_offload else stored / 4
    layers = [size for name, size in parts.items() if name.startswith("layers.")]
    layer = max(map(whole, layers))
    tokens = share.rows * training.seq_len / cp
    values = tokens * _values_per_token(config) / tp * compute
    vocabulary = config.vocab_size / tp
    chunk = training.loss_chunk_size
    whole_part = LOSS_CHUNKS["cuda"] if chunk is None else chunk or tokens
    # Of the stream as the output layer sees it, gathered, and of its weight, added up wide.
    logits = tokens * (1 + config.num_mtp_layers) * config.dim * compute
    logits += vocabulary * config.dim * (reduced + compute)
    # Logits, whose place their gradients take.
    logits = logits * share.losses + min(tokens, whole_part) * vocabulary * compute
    output = parts.get("output", Size(0))
    offload = training.enable_cpu_offload
    return Memory(
        stored=0.0 if offload else stored,
        gathered=layer * 3 * compute
        + _in_reduction(layers, parallelism, whole) * reduced
        + whole(output) * (2 * compute + reduced),
        kept=_kept(config, parallelism, recompute, tokens / tp * compute, share.layers)
        + share.streams * tokens / tp * config.dim * compute,
        layer=2 * values,
        logits=logits if output.dense else 0.0,
        accumulated=accumulated,
        exchange=_symmetric_memory(config, parallelism, round(tokens / tp), compute),
        host=stored if offload else 0.0,
    )


def _in_reduction(
    layers: list[Size], parallelism: Parallelism, whole: Callable[[Size], float]
) -> float:
    """Elements of the reductions that are under way at once: of two units in a row where experts
    are units of their own. `whole`: of a part, those that a rank gathers."""
    ep, etp = parallelism.expert_parallel_degree, parallelism.expert_tensor_parallel_degree
    layer = max(map(whole, layers))
    if parallelism.tensor_parallel_degree * ep * etp == 1:
        return layer
    apart = [part for size in layers for part in (Size(size.dense), Size(0, size.routed))]
    return max(map(sum, pairwise(size for size in map(whole, apart) if size)), default=layer)


@dataclass(frozen=True)
class Accumulation:
    """Holds the resolved `parallelism.fsdp_accumulation`, and the estimate if that chose it."""

    word: str
    """Value of `parallelism.fsdp_accumulation`: "reduce_each" or "keep_gathered", never "auto"."""
    microbatches: int
    """Number of microbatches in a step; 1 in a pipeline."""
    needed: float | None = None
    """Bytes of a GPU by the estimate; None unless the estimate has chosen "keep_gathered"."""
    usable: float | None = None
    """Bytes of a GPU that it may fill."""

    @property
    def line(self) -> str:
        """Returns the line for a log; empty if a step has one microbatch."""
        if self.microbatches == 1:
            return ""
        line = f"{self.microbatches} microbatches a step: fsdp_accumulation={self.word}"
        if self.needed is None or self.usable is None:
            return line
        return f"{line}, {self.needed / GIB:.1f} of {self.usable / GIB:.1f} GiB by arithmetic"


def choose_accumulation(
    config: ModelConfig,
    training: Training,
    parallelism: Parallelism,
    recompute: ActivationCheckpoint,
    world_size: int,
    device_bytes: float | None,
) -> Accumulation:
    """Resolves `parallelism.fsdp_accumulation`. `device_bytes`: a GPU's memory; None: a CPU."""
    degrees = parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    piped = parallelism.pipeline_parallel_degree > 1
    sequences = world_size // degrees * training.local_batch_size
    microbatches = 1 if piped else max(training.global_batch_size // sequences, 1)
    if parallelism.fsdp_accumulation != "auto":
        return Accumulation(parallelism.fsdp_accumulation, microbatches)
    if microbatches == 1 or device_bytes is None:
        return Accumulation("reduce_each", microbatches)
    usable = device_bytes - RESERVED
    keeping = parallelism.model_copy(update={"fsdp_accumulation": "keep_gathered"})
    needed = memory(config, training, keeping, recompute, world_size).total
    if needed <= usable:
        return Accumulation("keep_gathered", microbatches, needed, usable)
    return Accumulation("reduce_each", microbatches)


def _symmetric_memory(
    config: ModelConfig, parallelism: Parallelism, num_tokens: int, width: int
) -> float:
    """Three buffers of rows, two to send from and one to receive in, and of routing weights, which
    take 64 bytes each. `width`: bytes of an element."""
    ep, factor = parallelism.expert_parallel_degree, parallelism.expert_parallel_capacity_factor
    moe = config.moe
    if moe is None or ep == 1 or parallelism.expert_parallel_comm_backend != "symmetric":
        return 0.0
    received = rows_of_buffers(num_tokens, moe.top_k, moe.num_experts, ep, factor)
    return 3.0 * max(received, num_tokens * moe.top_k) * (config.dim * width + 64)


def _kept(
    config: ModelConfig,
    parallelism: Parallelism,
    recompute: ActivationCheckpoint,
    bytes_: float,
    num_layers: int,
) -> float:
    """A recomputed layer keeps its input and maybe the exchanged rows, one recomputed by operation
    what those return, another all its values. `bytes_`: of one value of every token."""
    values = _values_per_token(config)
    if recompute.mode == "none":
        return num_layers * values * bytes_
    whole = float(config.dim)
    if recompute.keep_exchanged_rows:
        whole += _exchanged_per_token(config, parallelism)
    if recompute.mode == "full":
        return num_layers * whole * bytes_
    if recompute.selective_ac_option == "op":
        return num_layers * _results_per_token(config, parallelism) * bytes_
    recomputed = -(-num_layers // int(recompute.selective_ac_option))
    return (recomputed * whole + (num_layers - recomputed) * values) * bytes_


def _exchanged_per_token(config: ModelConfig, parallelism: Parallelism) -> float:
    """Elements of a token's rows that arrive at its experts' ranks; with the deduplicating
    dispatcher, at as many ranks as a balanced router draws."""
    ranks = parallelism.expert_parallel_degree
    if config.moe is None or ranks == 1:
        return 0.0
    top_k, backend = config.moe.top_k, parallelism.expert_parallel_comm_backend
    chosen = backend == "auto" and deduplication_pays(top_k, ranks, ranks)
    once = chosen or backend == "deduplicated"
    return (places_reached(top_k, ranks) if once else top_k) * config.dim


def _values_per_token(config: ModelConfig) -> float:
    """Elements that one token's forward through the largest layer leaves for the backward."""
    own = max(attention_stats(mixer, config.dim).saved for mixer in config.mixers)
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
    input, attention with all it keeps, the results of products, and the exchanged rows."""
    own = max(attention_stats(mixer, config.dim).results for mixer in config.mixers)
    feed_forward = 2.0 * config.hidden_dim + config.dim if _has_dense_layer(config) else 0.0
    if moe := config.moe:
        routed: float = moe.top_k * (2 * moe.hidden_dim + config.dim)
        routed += _exchanged_per_token(config, parallelism)
        shared = 2 * moe.num_shared_experts * moe.hidden_dim
        feed_forward = max(feed_forward, routed + shared + config.dim * (shared > 0))
    return 2 * config.dim + own + feed_forward


def _has_dense_layer(config: ModelConfig) -> bool:
    return not all(map(config.is_moe_layer, range(config.num_layers)))
