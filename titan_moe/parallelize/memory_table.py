"""The lines of the memory estimate: what a rank keeps, by arithmetic. Imports no torch.

A line can be checked by hand against a model's config. Its factors, each with its source:

- Parameters by module: `models/stats.part_sizes`, which a test compares with the modules.
- `on_rank`: FSDP and expert parallelism cut each parameter of a stage over all its ranks but
  replicas (arXiv 2304.11277; 2504.14960 for the two views).
- `whole`: a gathered unit's parameters on one rank: tp cuts dense ones, ep and etp experts.
- 2 + 1 units: FSDP2 gathers the next layer during a layer's products, and has one layer's gradients
  before it reduces them (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
- Moments: AdamW has two for each parameter (arXiv 1711.05101), Muon one for a layer's matrices.
- Values per token: the tensors that `models/attention.py`, `moe/experts.py` and `ops` save for the
  backward. Tests compare them with what lives in a forward.
- Microbatches between forward and backward: `config/pipeline.in_flight`, from the schedules.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from titan_moe.config import pipeline
from titan_moe.config.job_config import JobConfig
from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.models.config import LOSS_CHUNKS, CompressedConfig, ModelConfig
from titan_moe.models.stats import Size, attention_stats, flash_workspace, part_sizes
from titan_moe.moe.config import places_reached, rows_of_buffers
from titan_moe.ops.activation import SWIGLU
from titan_moe.parallelize.communicators import communicators
from titan_moe.parallelize.plan import Plan

SKEW = 2.0
"""Rows of a rank's experts that must fit, as a multiple of an even share."""
# FlashAttention's backward has sums for so many more tokens after each sequence.
_PADDING = 128
# Float32 values of a pair of tokens that sparse attention has at once.
_PAIR_MATRICES = 6
BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
"""Type -> bytes of an element."""

Lines = dict[str, float]
"""Bytes, or elements, by what takes them."""
Table = dict[str, Lines]
"""Lines by the field of `Memory` that adds them up."""


def _widths(plan: Plan) -> tuple[int, int, int]:
    """Returns the bytes of an element of the weights that the optimizer updates, of gathered
    weights and activations, and of gradients that are added up."""
    stored = BYTES[plan.types.stored]
    return stored, BYTES[plan.types.compute], max(stored, 4)


class Share(NamedTuple):
    """One rank's part of the model, and how much of the batch it has between forward and
    backward at the worst moment."""

    parts: Mapping[str, Size]
    sequences: int
    """Sequences of one microbatch."""
    layers: int
    """Sum over these microbatches of the layers that each has passed here."""
    losses: int
    """Microbatches whose loss is computed and whose backward is still to come."""
    streams: int
    """Microbatches' inputs, outputs and gradients that wait at borders of stages."""


def _shares(plan: Plan) -> Iterator[Share]:
    """Yields the share of each rank of one pipeline; the whole model where there is none."""
    config, sizes, ranks = plan.config, part_sizes(plan.config), plan.dims.pp
    batch, parallelism = plan.job.training.local_batch_size, plan.job.parallelism
    if ranks == 1:
        yield Share(sizes, batch, config.num_layers + config.num_mtp_layers, 1, 0)
        return
    stages = [list(stage) for stage in plan.stages]
    layers = [sum(name.startswith("layers.") for name in stage) for stage in stages]
    layers[-1] += config.num_mtp_layers
    stages[-1] += [name for name in sizes if name == "mtp"]
    schedule = pipeline.schedule_of(parallelism)
    count = pipeline.num_microbatches(parallelism, batch)
    for rank, own in enumerate(plan.stages_of_ranks):
        outputs, losses = pipeline.in_flight(schedule, rank, ranks, len(stages), count)
        passed, left = 0, outputs
        for number in sorted((layers[stage] for stage in own), reverse=True):
            passed += number * min(count, left)
            left -= min(count, left)
        parts = {name: sizes[name] for stage in own for name in stages[stage]}
        # Torch has a buffer for the input, and for the output's gradient, of every microbatch.
        streams = outputs + 2 * count * len(own)
        yield Share(parts, parallelism.pipeline_parallel_microbatch_size, passed, losses, streams)


def tables(plan: Plan, skew: float = SKEW) -> Iterator[Table]:
    """Yields the bytes of each rank of one pipeline, by fields of `Memory` and by line. `skew`:
    rows of its experts, as a multiple of an even share."""
    nccl = {"buffers of NCCL": float(sum(communicators(plan).values()))}
    sizes = _sizes(plan)
    for share in _shares(plan):
        parameters, tokens = (
            _of_parameters(plan, share, sizes),
            _of_tokens(plan, share, sizes, skew),
        )
        yield parameters | tokens | {"communicators": nccl}


class Sizes(NamedTuple):
    """The elements of a model's parts with their adapters, and of what trains of them."""

    whole: Mapping[str, Size]
    trained: Mapping[str, Size]

    def keeps_hidden_rows(self, job: JobConfig) -> bool:
        """Returns whether the rows before the experts' last product are kept: for adapters."""
        return job.lora.rank is not None and any(size.routed for size in self.trained.values())


def _sizes(plan: Plan) -> Sizes:
    job, config = plan.job, plan.config
    warms_up = config.indexer is not None and job.training.indexer_stage == "dense"
    if job.lora.rank is None and not job.training.freeze and not warms_up and not config.sparse:
        sizes = part_sizes(config)
        return Sizes(sizes, sizes)
    stage = job.training.model_dump(include={"freeze", "indexer_stage"})
    return _sizes_by_name(config, json.dumps({"training": stage, "lora": job.lora.model_dump()}))


@lru_cache(maxsize=64)
def _sizes_by_name(config: ModelConfig, keys: str) -> Sizes:
    """`keys`: those of a job that say what trains, as JSON."""
    from titan_moe.models.trained import sizes_by_name  # With torch: names decide.

    job = JobConfig.model_validate_json(keys)
    return Sizes(*sizes_by_name(config, job.training, job.lora))


def _of_parameters(plan: Plan, share: Share, sizes: Sizes) -> Table:
    """Weights, gradients and moments: those that a rank owns, and those that it gathers."""
    dims, offload = plan.dims, plan.cpu_offload
    parts, trained = ({name: each[name] for name in share.parts} for each in sizes)
    stored, compute, reduced = _widths(plan)
    on_rank = dims.dp_replicate * dims.pp / dims.world_size

    def whole(size: Size) -> float:
        return size.dense / dims.tp + size.routed / (dims.ep * dims.etp)

    owned, training = (sum(map(sum, sizes.values())) * on_rank for sizes in (parts, trained))
    narrow = plan.job.optimizer.state_dtype == "bfloat16"
    frozen = compute if plan.job.lora.rank is not None else stored
    owns = {
        "weights": training * stored + (owned - training) * frozen,
        "gradients": training * stored,
        "moments": _moments(plan, trained) * on_rank * (BYTES["bfloat16"] if narrow else stored),
    }
    accumulated: Lines = {}
    if dims.pp > 1 or plan.accumulation == "keep_gathered":
        accumulated["sums of gradients"] = sum(map(whole, trained.values())) * reduced
        accumulated["gathered weights"] = sum(map(whole, parts.values())) * compute
        # Shards of gradients, which are counted above, are made from these sums and free them.
        accumulated["shards made of sums"] = 0.0 if offload else -training * stored
    layer, output = _largest_layer(parts, whole), whole(parts.get("output", Size(0)))
    layers = [size for name, size in trained.items() if name.startswith("layers.")]
    experts = max((size.routed for size in layers), default=0.0) / (dims.ep * dims.etp)
    trained_output = whole(trained.get("output", Size(0)))
    return {
        "stored": {} if offload else owns,
        "host": owns if offload else {},
        "gathered": {
            "weights of two layers": 2 * layer * compute,
            "gradients of a layer": _largest_layer(trained, whole) * compute,
            "experts' gradients of a second half": (
                experts * plan.job.parallelism.expert_parallel_overlap * compute
            ),
            "gradients in reduction": _in_reduction(layers, dims, whole) * reduced,
            "weights and gradients of the output layer": (output + trained_output) * compute,
            "its gradients in reduction": trained_output * reduced,
        },
        "accumulated": accumulated,
    }


def _of_tokens(plan: Plan, share: Share, sizes: Sizes, skew: float) -> Table:
    """Activations, logits and buffers of one microbatch, or of those in flight."""
    config, training, dims = plan.config, plan.job.training, plan.dims
    _, compute, reduced = _widths(plan)
    tokens = share.sequences * training.seq_len / dims.cp
    own_tokens = tokens / dims.tp
    most_rows = _most_rows(plan, max(round(own_tokens), 1), skew)
    even, skewed = (
        _activations(plan, share, sizes, own_tokens * compute, rows) for rows in (1.0, most_rows)
    )
    vocabulary = config.vocab_size / dims.tp
    chunk = training.loss_chunk_size
    in_chunk = min(tokens, LOSS_CHUNKS["cuda"] if chunk is None else chunk or tokens)
    weight = vocabulary * config.dim * any(sizes.trained["output"])
    logits = {
        # Their gradients take the logits' place. A cap holds them as they were, and its slope.
        "logits of a chunk": in_chunk * vocabulary * compute * (3 if config.logit_cap else 1),
        "gradients of the output layer's input": (
            share.losses * tokens * (1 + config.num_mtp_layers) * config.dim * compute
        ),
        "gradients of its weight, and their sum": share.losses * weight * (compute + reduced),
    }
    sums = flash_workspace(config, compute) * (own_tokens + _PADDING * share.sequences / dims.tp)
    return even | {
        "skew": {
            line: skewed[term][line] - size for term in even for line, size in even[term].items()
        },
        "attention": {"sums in FlashAttention's backward": sums},
        "logits": logits if "output" in share.parts else {},
        "exchange": _symmetric_memory(plan),
    }


def _moments(plan: Plan, trained: dict[str, Size]) -> float:
    """Returns the number of moments of what trains."""
    inside = sum(sum(size) for n, size in trained.items() if n.startswith(("layers.", "mtp")))
    matrices = inside if plan.job.optimizer.name == "Muon" else 0
    return 2 * sum(map(sum, trained.values())) - matrices


def _largest_layer(parts: dict[str, Size], whole: Callable[[Size], float]) -> float:
    layers = (size for name, size in parts.items() if name.startswith("layers."))
    return max(map(whole, layers), default=0.0)


def _in_reduction(layers: list[Size], dims: ParallelDims, whole: Callable[[Size], float]) -> float:
    """Elements of the reductions that are under way at once: of two units in a row where experts
    are units of their own. `whole`: a unit's parameters that a rank gathers."""
    layer = max(map(whole, layers), default=0.0)
    if dims.tp * dims.ep * dims.etp == 1:
        return layer
    apart = [part for size in layers for part in (Size(size.dense), Size(0, size.routed))]
    return max(map(sum, pairwise(size for size in map(whole, apart) if size)), default=layer)


def _symmetric_memory(plan: Plan) -> Lines:
    """Returns the bytes of three buffers, two to send from and one to receive in."""
    num_rows = 3.0 * plan.exchange_rows
    if not num_rows:
        return {}
    return {
        "buffers of rows": num_rows * plan.config.row_dim * _widths(plan)[1],
        "routing weights, in 64 bytes each": num_rows * 64,
    }


def _most_rows(plan: Plan, num_tokens: int, skew: float) -> float:
    """Returns the most rows that a rank's experts get, as a multiple of an even share: `skew`, or
    what bounded buffers hold. Symmetric memory without a bound holds all that can come."""
    moe, ep, factor = plan.config.moe, plan.dims.ep, plan.dispatch.capacity_factor
    if moe is None or ep == 1:
        return 1.0
    if plan.dispatch.name != "symmetric":
        factor = factor or skew
    most = rows_of_buffers(num_tokens, moe.top_k, moe.num_experts, ep, factor)
    return max(most / (num_tokens * moe.top_k), 1.0)


def _activations(plan: Plan, share: Share, sizes: Sizes, bytes_: float, rows: float) -> Table:
    """Values that the forward keeps for the backward, one layer's values and their gradients, and
    the copies of its rows.

    A recomputed layer keeps its input and maybe the exchanged rows, one recomputed by operation
    what those return, another all its values. `bytes_`: of one value of every token. `rows`: those
    of the rank's experts, as a multiple of an even share.
    """
    config, recompute, num_layers = plan.config, plan.job.activation_checkpoint, share.layers
    slices = plan.dims.etp
    values = dict(values_per_token(config, rows, slices))
    results = _results_per_token(plan, rows)
    if config.moe and sizes.keeps_hidden_rows(plan.job):
        hidden = rows * config.moe.top_k * config.moe.hidden_dim
        values["rows before the experts' last product"] = hidden
        results["rows before the experts' last product"] = hidden
    recomputed: Lines = {"inputs": float(config.dim * config.streams)}
    pairs = 0.0
    if config.indexer is not None:
        # Matrices of all pairs, whole on each rank of tp, and a mask that takes half a value a
        # pair; a recomputation replays a bit a pair.
        pairs = float(plan.job.training.seq_len * plan.dims.tp)
        values["mask of pairs"] = results["mask of pairs"] = pairs / 2
        recomputed["bits of pairs"] = pairs / 16
    if isinstance(config.attention, CompressedConfig):  # No fused kernel takes its heads.
        scores = 2.0 * plan.job.training.seq_len * config.attention.num_heads
        values["scores of pairs"] = results["scores of pairs"] = scores
    if recompute.keep_exchanged_rows:
        recomputed["exchanged rows"] = _exchanged_per_token(plan, rows)
    if recompute.keep_attention:  # As wide as values, or more.
        recomputed["attention"] = max(each.num_heads * each.qk_dim for each in config.attentions)
    num_recomputed = -(-num_layers // recompute.every) if recompute.every else 0
    num_others = num_layers - num_recomputed
    kept = {f"{name} of recomputed layers": num_recomputed * n for name, n in recomputed.items()}
    others = results if recompute.by_operation else values
    kept |= {f"{name} of other layers": num_others * n for name, n in others.items()}
    kept["inputs and outputs of stages"] = share.streams * config.dim * config.streams
    layer = {f"{name}, with gradients": 2 * n for name, n in values.items()}
    layer["matrices of pairs"] = _PAIR_MATRICES * 2 * pairs
    copies = 2 * slices * rows * config.moe.top_k * config.row_dim if config.moe else 0.0
    table = {"kept": kept, "layer": layer, "copies": {"rows that go home": copies}}
    return {term: {line: n * bytes_ for line, n in lines.items()} for term, lines in table.items()}


def _exchanged_per_token(plan: Plan, rows: float) -> float:
    """Elements of a token's rows that arrive at its experts' ranks, at each that has a slice; with
    the deduplicating dispatcher, at as many ranks as a balanced router draws, at most at all."""
    moe, ranks, slices = plan.config.moe, plan.dims.ep, plan.dims.etp
    if moe is None or ranks * slices == 1:
        return 0.0
    once = min(rows * places_reached(moe.top_k, ranks), ranks)
    deduplicates = plan.dispatch.name == "deduplicated"
    return slices * (once if deduplicates else rows * moe.top_k) * plan.config.row_dim


@lru_cache(maxsize=256)
def values_per_token(config: ModelConfig, rows: float, slices: int) -> Lines:
    """Elements that one token's forward through the largest layer leaves for the backward. Each of
    the `slices` that etp cuts an expert into has all of its rows."""
    attention = max(attention_stats(mixer, config.dim).saved for mixer in config.mixers)
    # Gate, up and the rows of the last product; of plain SwiGLU silu(gate) too.
    activation = config.activation.of(-1)
    dense = 2 + activation.gated + (activation == SWIGLU)
    feed_forward = float(dense) * config.hidden_dim * config.has_dense
    beside = feed_forward * config.dense_beside_experts
    if moe := config.moe:
        # x, gate and up of a routed row are kept, the sum of a latent's rows; the rest is computed
        # again.
        row = slices * config.row_dim + (1 + moe.activation.gated) * moe.hidden_dim
        routed = rows * moe.top_k * row + (moe.latent_dim or 0)
        shared = dense * moe.num_shared_experts * moe.hidden_dim
        feed_forward = max(feed_forward, routed + shared + beside)
    # Both norms' outputs and both sums with the stream; norms after them keep what they read.
    norms = 4 + 2 * config.sandwich_norms + 5 * config.dense_beside_experts
    if config.streams > 1:  # Streams and their norm, in float32, and what both sublayers add.
        norms += 12 * config.streams
    return _largest(config, norms * config.dim, attention, feed_forward)


def _results_per_token(plan: Plan, rows: float) -> Lines:
    """Elements that recomputation by operation keeps of a token in the largest layer: the layer's
    input, attention with all it keeps, the results of products, and the exchanged rows."""
    config = plan.config
    attention = max(attention_stats(mixer, config.dim).results for mixer in config.mixers)
    first = 1 + config.activation.gated
    feed_forward = float(first * config.hidden_dim + config.dim) * config.has_dense
    beside = feed_forward * config.dense_beside_experts
    if moe := config.moe:
        row = (1 + moe.activation.gated) * moe.hidden_dim + plan.dims.etp * config.row_dim
        routed = rows * moe.top_k * row
        if moe.latent_dim is not None:  # The results of both maps.
            routed += moe.latent_dim + config.dim
        routed += _exchanged_per_token(plan, rows)
        shared = first * moe.num_shared_experts * moe.hidden_dim
        feed_forward = max(feed_forward, routed + shared + config.dim * (shared > 0) + beside)
    return _largest(config, 2 * config.dim, attention, feed_forward)


def _largest(config: ModelConfig, norms: float, attention: float, feed_forward: float) -> Lines:
    """Returns the lines of the largest layer. Where no layer has two parts, it has the larger."""
    if config.num_residuals <= config.num_layers:
        norms, attends = norms / 2, attention > feed_forward
        attention, feed_forward = attention * attends, feed_forward * (not attends)
    return {"norms and sums": norms, "attention": attention, "feed-forward": feed_forward}
