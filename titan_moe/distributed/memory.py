"""Estimates by arithmetic what a run keeps in a GPU's memory. Imports no torch.

Peaks that do not quite meet (the logits', one layer's backward) are added. A pipeline's rank is
counted with all its stages gathered, which is an upper bound. Nothing of it has been compared with
a GPU; a run logs what it measures beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from titan_moe.config.job_config import ActivationCheckpoint, Optimizer, Parallelism, Training
from titan_moe.distributed.communicators import NODE, communicator_bytes
from titan_moe.distributed.parallel_dims import GROUP_AXES, TOKEN_AXES, ParallelDims, parallel_dims
from titan_moe.models.config import LOSS_CHUNKS, MLAConfig, ModelConfig
from titan_moe.models.stats import Share, Size, attention_stats, flash_workspace, shares_of_ranks
from titan_moe.moe.config import deduplication_pays, places_reached, rows_of_buffers

GIB = 2**30
RESERVED = 3 * GIB
"""Memory for CUDA's context and kernels, and for a fragmented allocator."""
MARGIN = 4 * GIB
"""Memory that shipped configurations and "auto" leave, while no GPU has confirmed the estimate."""
SKEW = 2.0
"""Rows of a rank's experts that must fit, as a multiple of an even share."""
# FlashAttention's backward leaves room for so many tokens after each sequence.
_ROOM = 128
# Float32 values of a pair of tokens that sparse attention has at once.
_PAIR_MATRICES = 6
_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    stored: float
    """This rank's shard of weights, and of gradients and moments of what trains."""
    gathered: float
    """Weights of two of the largest layers, gradients of one before and while they are reduced;
    weights and gradients of the output layer. Where experts are reduced apart, two reductions are
    under way; where rows travel in two halves, each half makes gradients of the experts."""
    kept: float
    """Values that the forward keeps for the backward; in a pipeline, of all microbatches between
    the two, and the buffers in which each microbatch arrives."""
    layer: float
    """The recomputed values of one layer, and their gradients."""
    attention: float
    """The workspace of FlashAttention's backward (`flash_workspace`), with room after each sequence
    but not after each document. `debug.deterministic` may double its sums."""
    copies: float
    """Rows of one layer's T * K choices that are neither kept nor gradients: the experts' outputs,
    and the buffer that they are sent home in. Other moments need no more."""
    logits: float
    """Logits of one chunk of the loss, and the output layer's gradients, which stay after it."""
    accumulated: float
    """Sums of gradients that are still to be reduced, and parameters that stay gathered, in a
    pipeline or with `parallelism.fsdp_accumulation="keep_gathered"`; else 0, also for "auto"."""
    exchange: float
    """Symmetric memory of the dispatcher that has some."""
    host: float
    """Bytes in the host's memory for each GPU, which `stored` has moved to."""
    skew: float
    """Activations of a rank whose experts get `SKEW` times an even share of rows in every layer,
    or as many as bounded buffers hold: what they add to the others' terms."""
    communicators: float
    """Buffers of NCCL."""

    @property
    def terms(self) -> dict[str, float]:
        """Bytes of the tensors on the GPU, with even shares of rows."""
        return {
            "stored": self.stored,
            "gathered": self.gathered,
            "kept": self.kept,
            "one layer": self.layer,
            "attention": self.attention,
            "copies": self.copies,
            "logits": self.logits,
            "accumulated": self.accumulated,
            "symmetric memory": self.exchange,
        }

    @property
    def total(self) -> float:
        """Tensors on the GPU, with even shares of rows."""
        return sum(self.terms.values())

    @property
    def needed(self) -> float:
        """All that a GPU must have room for."""
        return self.total + self.skew + self.communicators + RESERVED

    def __str__(self) -> str:
        """One line of tensors, in GiB; in MiB where the sum is below 1 GiB."""
        optional = ("attention", "copies", "accumulated", "symmetric memory")
        unit = GIB if self.unit == "GiB" else 2**20
        terms = [
            f"{name} {size / unit:.1f}"
            for name, size in self.terms.items()
            if size or name not in optional
        ]
        host = f"; in the host's memory {self.host / unit:.1f}" if self.host else ""
        return f"{' + '.join(terms)} = {self.total / unit:.1f}{host}"

    @property
    def unit(self) -> str:
        """The unit of the line."""
        return "GiB" if self.total + self.host >= GIB else "MiB"

    def margin(self, gpu: float) -> str:
        """Returns a line on what is left of a GPU of so many bytes."""
        left, skew, nccl = (gpu - self.needed) / GIB, self.skew / GIB, self.communicators / GIB
        word = f"{left:.1f} left" if left >= 0 else f"{-left:.1f} short"
        more = f"{skew:.1f} for rows skewed {SKEW:g}x, {nccl:.1f} for communicators and "
        more += f"{RESERVED / GIB:g} for CUDA and the allocator"
        return f"{self.needed / GIB:.1f} of {gpu / GIB:.1f} GiB, {word}, with {more}"


class Plan(NamedTuple):
    """Holds all that the estimate reads."""

    config: ModelConfig
    training: Training
    parallelism: Parallelism
    recompute: ActivationCheckpoint
    optimizer: Optimizer
    world_size: int

    @property
    def dims(self) -> ParallelDims:
        """Raises ValueError for degrees that do not fit the world."""
        return parallel_dims(self.parallelism, self.world_size)

    def deduplicates(self, places: int) -> bool:
        """Returns whether tokens are sent once to each of `places`, ranks or nodes."""
        moe, backend = self.config.moe, self.parallelism.expert_parallel_comm_backend
        if moe is None or self.parallelism.expert_parallel_capacity_factor is not None:
            return False
        pays = deduplication_pays(moe.top_k, places, self.parallelism.expert_parallel_degree)
        return backend == "deduplicated" or (backend == "auto" and pays)


def memory(plan: Plan) -> Memory:
    """The estimate for one rank: in a pipeline, for the one that needs most.

    Raises ConfigError for a pipeline that this model cannot be cut into, and as `Plan.dims`.
    """
    shares = shares_of_ranks(plan.config, plan.training, plan.parallelism)
    return max((_of_rank(plan, share) for share in shares), key=lambda found: found.needed)


def _of_rank(plan: Plan, share: Share) -> Memory:
    config, training, parallelism, _, _, world_size = plan
    dims, parts = plan.dims, share.parts
    wide = _BYTES[training.dtype]
    compute = _BYTES["float64"] if wide == 8 else _BYTES[training.mixed_precision_param]
    on_rank = dims.dp_replicate * dims.pp / world_size
    owned = sum(sum(size) for size in parts.values()) * on_rank
    stored = owned * wide + _trained(plan, share) * on_rank

    def whole(size: Size) -> float:
        return size.dense / dims.tp + size.routed / (dims.ep * dims.etp)

    reduced = max(wide, 4)
    accumulated = 0.0
    if dims.pp > 1 or parallelism.fsdp_accumulation == "keep_gathered":
        # The shards of gradients, which `stored` has, are made from these sums and free them.
        accumulated = sum(map(whole, parts.values())) * (reduced + compute)
        accumulated -= 0.0 if training.enable_cpu_offload else owned * wide
    layers = [size for name, size in parts.items() if name.startswith("layers.")]
    layer = max(map(whole, layers), default=0.0)
    routed = max((size.routed for size in layers), default=0.0) / (dims.ep * dims.etp)
    tokens = share.rows * training.seq_len / dims.cp
    own_tokens = tokens / dims.tp
    most_rows = _most_rows(config, parallelism, max(round(own_tokens), 1))
    values = kept, one_layer, copies = _activations(plan, share, own_tokens * compute, rows=1.0)
    with_most_rows = _activations(plan, share, own_tokens * compute, rows=most_rows)
    vocabulary = config.vocab_size / dims.tp
    chunk = training.loss_chunk_size
    whole_part = LOSS_CHUNKS["cuda"] if chunk is None else chunk or tokens
    # Gradients of the output layer's gathered input, and of its weight, added up in a wide type.
    logits = tokens * (1 + config.num_mtp_layers) * config.dim * compute
    logits += vocabulary * config.dim * (reduced + compute)
    # Logits, whose place their gradients take.
    logits = logits * share.losses + min(tokens, whole_part) * vocabulary * compute
    output = parts.get("output", Size(0))
    offload = training.enable_cpu_offload
    return Memory(
        stored=0.0 if offload else stored,
        gathered=(layer * 3 + routed * parallelism.expert_parallel_overlap) * compute
        + _in_reduction(layers, dims, whole) * reduced
        + whole(output) * (2 * compute + reduced),
        kept=kept,
        layer=one_layer,
        attention=flash_workspace(config, compute) * (own_tokens + _ROOM * share.rows / dims.tp),
        copies=copies,
        logits=logits if output.dense else 0.0,
        accumulated=accumulated,
        exchange=_symmetric_memory(config, parallelism, own_tokens * most_rows, compute),
        host=stored if offload else 0.0,
        skew=sum(with_most_rows) - sum(values),
        communicators=sum(communicators(plan).values()),
    )


def _trained(plan: Plan, share: Share) -> float:
    """Bytes of a stage's gradients and moments; Muon keeps one moment of layers' matrices."""
    config, attention, wide = plan.config, plan.config.attention, _BYTES[plan.training.dtype]
    moment = _BYTES["bfloat16"] if plan.optimizer.state_dtype == "bfloat16" else wide
    sizes = {name: sum(size) for name, size in share.parts.items()}
    trained = sum(sizes.values())
    dense = config.indexer is not None and plan.training.indexer_stage == "dense"
    if dense and isinstance(attention, MLAConfig):
        kinds = attention, replace(attention, indexer=None)
        indexed, bare = (attention_stats(kind, config.dim).parameters for kind in kinds)
        trained = share.layers * (indexed - bare)
    inside = sum(n for name, n in sizes.items() if name.startswith(("layers.", "mtp")))
    matrices = min(trained, inside) if plan.optimizer.name == "Muon" else 0
    return trained * wide + (2 * trained - matrices) * moment


def _in_reduction(layers: list[Size], dims: ParallelDims, whole: Callable[[Size], float]) -> float:
    """Elements of the reductions that are under way at once: of two units in a row where experts
    are units of their own. `whole`: of a part, those that a rank gathers."""
    layer = max(map(whole, layers), default=0.0)
    if dims.tp * dims.ep * dims.etp == 1:
        return layer
    apart = [part for size in layers for part in (Size(size.dense), Size(0, size.routed))]
    return max(map(sum, pairwise(size for size in map(whole, apart) if size)), default=layer)


@dataclass(frozen=True)
class Accumulation:
    """Holds the resolved `parallelism.fsdp_accumulation`, and the plan with it."""

    word: str
    """Value of `parallelism.fsdp_accumulation`: "reduce_each" or "keep_gathered", never "auto"."""
    microbatches: int
    """Number of microbatches in a step; 1 in a pipeline."""
    plan: Plan

    @property
    def estimate(self) -> Memory:
        """Returns a rank's memory. Raises as `memory`."""
        return memory(self.plan)

    @property
    def line(self) -> str:
        """Returns the line for a log; empty if a step has one microbatch."""
        if self.microbatches == 1:
            return ""
        kept = self.estimate.accumulated / GIB
        more = f", for {kept:.1f} GiB more" if kept else ""
        return f"{self.microbatches} microbatches a step: fsdp_accumulation={self.word}{more}"


def choose_accumulation(plan: Plan, device_bytes: float | None) -> Accumulation:
    """Resolves `parallelism.fsdp_accumulation`. `device_bytes`: a GPU's memory; None: a CPU."""
    training, parallelism, dims = plan.training, plan.parallelism, plan.dims
    sequences = dims.size("batch") * training.local_batch_size
    microbatches = 1 if dims.pp > 1 else max(training.global_batch_size // sequences, 1)

    def with_word(word: str) -> Accumulation:
        resolved = parallelism.model_copy(update={"fsdp_accumulation": word})
        return Accumulation(word, microbatches, plan._replace(parallelism=resolved))

    if parallelism.fsdp_accumulation != "auto":
        return with_word(parallelism.fsdp_accumulation)
    if microbatches > 1 and device_bytes is not None:
        keeping = with_word("keep_gathered")
        if keeping.estimate.needed + MARGIN <= device_bytes:
            return keeping
    return with_word("reduce_each")


def _symmetric_memory(
    config: ModelConfig, parallelism: Parallelism, num_tokens: float, width: int
) -> float:
    """Three buffers of rows, two to send from and one to receive in, and of routing weights, which
    take 64 bytes each. `num_tokens`: of whose rows each has room; `width`: bytes of an element."""
    symmetric = parallelism.expert_parallel_comm_backend == "symmetric"
    if config.moe is None or parallelism.expert_parallel_degree == 1 or not symmetric:
        return 0.0
    return 3.0 * num_tokens * config.moe.top_k * (config.dim * width + 64)


def communicators(plan: Plan) -> dict[tuple[tuple[int, ...], bool], int]:
    """Returns the bytes of NCCL's buffers for each of rank 0's groups of more than one rank.

    A key is the ranks, and whether tokens travel between them (`process_groups.GroupKind`).
    Exchanges of a change of layout, and Muon's over edp and etp joined, are left out.
    """
    dims, parallelism, muon = plan.dims, plan.parallelism, plan.optimizer.name == "Muon"
    cp = parallelism.context_parallel_rotate_method != "allgather"
    sends = {"ep": True, "pp": True, "cp": cp, "fsdp": muon, "edp": muon}
    found = {(tuple(range(plan.world_size)), False): False}
    for axis in (*GROUP_AXES, "cp", "sequence"):
        kind = dims.group_of(0, axis), axis in TOKEN_AXES
        found[kind] = found.get(kind, False) or sends.get(axis, False)
    if muon and dims.tp > 1 and dims.size("fsdp") > 1:
        found[dims.group_of(0, ("fsdp", "tp")), False] = True
    on_node = dims.ranks_on_node(parallelism.expert_parallel_ranks_per_node or NODE)
    if on_node and plan.deduplicates(places=dims.ep // on_node):
        ranks = dims.group_of(0, "ep")
        found[ranks[:on_node], True] = found[ranks[::on_node], True] = True
    return {kind: communicator_bytes(kind[0], found[kind]) for kind in found if len(kind[0]) > 1}


def _most_rows(config: ModelConfig, parallelism: Parallelism, num_tokens: int) -> float:
    """Rows that a rank's experts must have room for, as a multiple of an even share. Symmetric
    memory without a bound has room for all that can come."""
    ep, factor = parallelism.expert_parallel_degree, parallelism.expert_parallel_capacity_factor
    moe = config.moe
    if moe is None or ep == 1:
        return 1.0
    if parallelism.expert_parallel_comm_backend != "symmetric":
        factor = factor or SKEW
    most = rows_of_buffers(num_tokens, moe.top_k, moe.num_experts, ep, factor)
    return max(most / (num_tokens * moe.top_k), 1.0)


def _activations(
    plan: Plan, share: Share, bytes_: float, rows: float
) -> tuple[float, float, float]:
    """Bytes of values that the forward keeps, of one layer's values and their gradients, and of the
    copies of its rows.

    A recomputed layer keeps its input and maybe the exchanged rows, one recomputed by operation
    what those return, another all its values. `bytes_`: of one value of every token. `rows`: those
    of the rank's experts, as a multiple of an even share.
    """
    config, recompute, num_layers = plan.config, plan.recompute, share.layers
    values, results = _values_per_token(config, rows), _results_per_token(plan, rows)
    whole, pairs = float(config.dim), 0.0
    if config.indexer is not None:
        # Matrices of all pairs, whole on each rank of tp, and a mask that takes half a value a
        # pair; a recomputation replays a bit a pair.
        pairs = float(plan.training.seq_len * plan.dims.tp)
        values, results = values + pairs / 2, results + pairs / 2
        whole += pairs / 16
    if recompute.keep_exchanged_rows:
        whole += _exchanged_per_token(plan, rows)
    if recompute.keep_attention:
        whole += config.attention.num_heads * config.attention.qk_dim  # As wide as values, or more.
    if recompute.mode == "none":
        kept = num_layers * values
    elif recompute.mode == "full":
        kept = num_layers * whole
    elif recompute.selective_ac_option == "op":
        kept = num_layers * results
    else:
        recomputed = -(-num_layers // int(recompute.selective_ac_option))
        kept = recomputed * whole + (num_layers - recomputed) * values
    kept += share.streams * config.dim
    copies = 2 * rows * config.moe.top_k * config.dim if config.moe else 0.0
    return kept * bytes_, (2 * values + _PAIR_MATRICES * 2 * pairs) * bytes_, copies * bytes_


def _exchanged_per_token(plan: Plan, rows: float) -> float:
    """Elements of a token's rows that arrive at its experts' ranks; with the deduplicating
    dispatcher, at as many ranks as a balanced router draws, at most at all of them."""
    moe, ranks = plan.config.moe, plan.parallelism.expert_parallel_degree
    if moe is None or ranks == 1:
        return 0.0
    once = min(rows * places_reached(moe.top_k, ranks), ranks)
    return (once if plan.deduplicates(ranks) else rows * moe.top_k) * plan.config.dim


def _values_per_token(config: ModelConfig, rows: float) -> float:
    """Elements that one token's forward through the largest layer leaves for the backward."""
    own = max(attention_stats(mixer, config.dim).saved for mixer in config.mixers)
    # Gate, up, silu(gate) and their product.
    feed_forward = 4.0 * config.hidden_dim if _has_dense_layer(config) else 0.0
    if moe := config.moe:
        # x, gate and up of a routed row are kept; the rest is computed again.
        routed = rows * moe.top_k * (config.dim + 2 * moe.hidden_dim)
        shared = 4 * moe.num_shared_experts * moe.hidden_dim
        feed_forward = max(feed_forward, routed + shared)
    # Both norms' outputs and both sums with the stream.
    return 4 * config.dim + own + feed_forward


def _results_per_token(plan: Plan, rows: float) -> float:
    """Elements that recomputation by operation keeps of a token in the largest layer: the layer's
    input, attention with all it keeps, the results of products, and the exchanged rows."""
    config = plan.config
    own = max(attention_stats(mixer, config.dim).results for mixer in config.mixers)
    feed_forward = 2.0 * config.hidden_dim + config.dim if _has_dense_layer(config) else 0.0
    if moe := config.moe:
        routed = rows * moe.top_k * (2 * moe.hidden_dim + config.dim)
        routed += _exchanged_per_token(plan, rows)
        shared = 2 * moe.num_shared_experts * moe.hidden_dim
        feed_forward = max(feed_forward, routed + shared + config.dim * (shared > 0))
    return 2 * config.dim + own + feed_forward


def _has_dense_layer(config: ModelConfig) -> bool:
    return not all(map(config.is_moe_layer, range(config.num_layers)))
