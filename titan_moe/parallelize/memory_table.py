"""The lines of the memory estimate: what a rank holds, by arithmetic. Imports no torch.

A line can be checked by hand against a model's config. Its factors, each with its source:

- Parameters by module: `models/stats.part_sizes`, which a test compares with the modules.
- `on_rank`: FSDP and expert parallelism cut each parameter of a stage over all its ranks but
  replicas (arXiv 2304.11277; 2504.14960 for the two views).
- `_Units`: a gathered unit's parameters on one rank: tp cuts dense ones, ep and etp experts. FSDP2
  gathers the next unit during a layer's products, and has a layer's gradients before it reduces.
- Moments: AdamW has two for each parameter (arXiv 1711.05101), Muon one for a layer's matrices.
- Values per token: `activations.py`.
- Microbatches between forward and backward: `config/pipeline.in_flight`, from the schedules.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from titan_moe.config import pipeline
from titan_moe.config.job_config import JobConfig
from titan_moe.models.config import LOSS_CHUNKS, ModelConfig
from titan_moe.models.stats import Size, kinds_of_layers, part_sizes
from titan_moe.moe.config import rows_of_buffers
from titan_moe.parallelize.activations import LayerValues, Lines, layer_values
from titan_moe.parallelize.communicators import communicators
from titan_moe.parallelize.plan import BYTES, Plan

SKEW = 2.0
"""Rows of a rank's experts that must fit, as a multiple of an even share."""


class Moment(NamedTuple):
    """A moment of a step at which a rank may hold most: nearly all values of the forward are kept,
    or nearly all gradients are made."""

    name: str
    is_early: bool = False
    """The backward comes to the first two layers of a stage."""
    in_attention: bool = False
    """The backward of a layer's feed-forward is over."""


LOSS = Moment("the loss")
EMBEDDING = Moment("the embedding's backward", is_early=True)
MOMENTS = (
    LOSS,
    Moment("the last feed-forward's backward"),
    Moment("the last attention's backward", in_attention=True),
    Moment("the first feed-forward's backward", is_early=True),
    Moment("the first attention's backward", is_early=True, in_attention=True),
    EMBEDDING,
)
Table = dict[str, Lines]
"""Lines by the field of `Memory` that adds them up."""


class Share(NamedTuple):
    """One rank's part of the model, and how much of the batch it has between forward and
    backward at the worst moment."""

    parts: Mapping[str, Size]
    sequences: int
    """Sequences of one microbatch."""
    passes: Mapping[int, int]
    """Passes of these microbatches through layers here, by the first layer of a kind."""
    through: Mapping[int, int]
    """Passes whose backward is over when one microbatch's backward comes to `first`."""
    first: tuple[str, ...]
    """The first two layers of a stage, and the embedding before them."""
    losses: int
    """Microbatches whose loss is computed and whose backward is still to come."""
    streams: int
    """Microbatches' inputs, outputs and gradients that wait at borders of stages."""
    has_gradients: bool
    """True if gradients of an earlier microbatch are there."""


def _shares(plan: Plan) -> Iterator[Share]:
    """Yields the share of each rank of one pipeline; the whole model where there is none."""
    config, sizes, ranks = plan.config, part_sizes(plan.config), plan.dims.pp
    batch, parallelism = plan.job.training.local_batch_size, plan.job.parallelism
    if ranks == 1:
        passes, through = (kinds_of_layers(config, tuple(sizes)[n:]) for n in (0, 3))
        yield Share(sizes, batch, passes, through, tuple(sizes)[:3], 1, 0, plan.microbatches > 1)
        return
    stages = [tuple(stage) for stage in plan.stages]
    kinds = [kinds_of_layers(config, stage) for stage in stages]
    stages[-1] += tuple(name for name in sizes if name == "mtp")
    schedule = pipeline.schedule_of(parallelism)
    size = parallelism.pipeline_parallel_microbatch_size
    count = pipeline.num_microbatches(parallelism, batch)
    for rank, own in enumerate(plan.stages_of_ranks):
        outputs, losses = pipeline.in_flight(schedule, rank, ranks, len(stages), count)
        # All may be in flight at once, or all but one and the gradients of that one: nearly alike.
        passes, left = Counter[int](), max(min(outputs, count * len(own) - 1), 1)
        for stage in sorted(own, key=lambda stage: -sum(kinds[stage].values())):
            times, left = min(count, left), max(left - count, 0)
            passes.update({kind: times * number for kind, number in kinds[stage].items()})
        parts = {name: sizes[name] for stage in own for name in stages[stage]}
        # Torch has a buffer for the input, and for the output's gradient, of every microbatch.
        streams = outputs + 2 * count * len(own)
        first, through = stages[own[0]][:3], kinds_of_layers(config, stages[own[0]][3:])
        yield Share(parts, size, passes, through, first, losses, streams, count * len(own) > 1)


def tables(
    plan: Plan, skew: float = SKEW, *, all_ranks: bool = True
) -> Iterator[tuple[int, str, Table]]:
    """Yields a rank of one pipeline, the name of a moment, and the bytes then, by fields of
    `Memory` and by line. `skew`: rows of its experts, as a multiple of an even share. Without
    `all_ranks`, of ranks with parts of the same sizes the first alone, which has most in flight."""
    nccl = {"buffers of NCCL": float(sum(communicators(plan).values()))}
    sizes, exchange, shares = _sizes(plan), _symmetric_memory(plan), list(_shares(plan))
    if not all_ranks:
        shares = list({tuple(share.parts.values()): share for share in reversed(shares)}.values())
    tokens = shares[0].sequences * plan.job.training.seq_len / plan.dims.cp / plan.dims.tp
    hidden_rows = sizes.keeps_hidden_rows(plan.job)
    kinds = [
        {
            kind: layer_values(plan, kind, rows, hidden_rows=hidden_rows, joined=joined)
            for kind in kinds_of_layers(plan.config, tuple(sizes.whole))
        }
        for rows, joined in ((1.0, 0.0), _skewed(plan, sizes, tokens, skew))
    ]
    scale = tokens * plan.widths[1]
    for rank, share in enumerate(shares):
        units, logits = _units(plan, share, sizes), _logits(plan, share, sizes)
        for moment in MOMENTS:
            even, skewed = (_activations(plan, share, moment, layers) for layers in kinds)
            beyond = sum(map(_total, skewed.values())) - sum(map(_total, even.values()))
            yield (
                rank,
                moment.name,
                {
                    **_of_parameters(plan, share, units, moment),
                    **{term: {n: x * scale for n, x in even[term].items()} for term in even},
                    "logits": logits if moment is LOSS else {},
                    "exchange": exchange,
                    "skew": {"rows beyond an even share": beyond * scale},
                    "communicators": nccl,
                },
            )


def _total(lines: Lines) -> float:
    return sum(lines.values())


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


class _Units(NamedTuple):
    """Elements of a rank's part of the model."""

    owned: float
    training: float
    """Owned elements that train."""
    late: float
    """Owned elements that train and whose gradients come with `Share.first`."""
    moments: float
    whole: float
    """Parameters that it gathers, of all units."""
    unsharded: float
    """Parameters that stay gathered because no other rank has a shard."""
    trained: float
    """Gathered elements that train."""
    first: float
    """Parameters of the units of `Share.first`."""
    trained_first: float
    first_layer: float
    layer: float
    """Gathered elements of the largest layer."""
    gradients: float
    """Gathered elements that train, of the layer with most."""
    dense: float
    """Elements of a layer that train and are not experts'."""
    routed: float
    embedding: tuple[float, float]
    """Gathered elements of the embedding, and those that train."""
    output: tuple[float, float]
    ahead: float
    """Gathered elements of multi-token prediction."""


def _units(plan: Plan, share: Share, sizes: Sizes) -> _Units:
    dims = plan.dims
    on_rank = dims.dp_replicate * dims.pp / dims.world_size
    tp, experts = dims.tp, dims.ep * dims.etp
    parts, trained = ({name: each[name] for name in share.parts} for each in sizes)
    gathered, gradients = (
        {name: size.dense / tp + size.routed / experts for name, size in each.items()}
        for each in (parts, trained)
    )
    dense, routed = (plan.accumulation == "keep_unsharded" and each for each in plan.unsharded)
    stay = {n: dense * s.dense / tp + routed * s.routed / experts for n, s in parts.items()}
    gathered = {name: size - stay[name] for name, size in gathered.items()}
    layers = [name for name in parts if name.startswith("layers.")]
    return _Units(
        owned=sum(map(sum, parts.values())) * on_rank,
        training=sum(map(sum, trained.values())) * on_rank,
        late=sum(sum(trained[name]) for name in share.first) * on_rank,
        moments=_moments(plan, trained) * on_rank,
        whole=sum(gathered.values()),
        unsharded=sum(stay.values()),
        trained=sum(gradients.values()),
        first=sum(gathered[name] for name in share.first),
        trained_first=sum(gradients[name] for name in share.first),
        first_layer=gathered[layers[0]],
        layer=max(gathered[name] for name in layers),
        gradients=max(gradients[name] for name in layers),
        dense=max(trained[name].dense for name in layers) / tp,
        routed=max(trained[name].routed for name in layers) / experts,
        embedding=(gathered.get("tok_embeddings", 0.0), gradients.get("tok_embeddings", 0.0)),
        output=(gathered.get("output", 0.0), gradients.get("output", 0.0)),
        ahead=gathered.get("mtp", 0.0),
    )


def _of_parameters(plan: Plan, share: Share, units: _Units, moment: Moment) -> Table:
    """Weights, gradients and moments: those that a rank owns, and those that it gathers."""
    stored, compute, reduced = plan.widths
    sums = plan.dims.pp > 1 or plan.accumulation == "keep_gathered"
    frozen = compute if plan.job.lora.rank is not None else stored
    narrow = plan.job.optimizer.state_dtype == "bfloat16"
    made, whole = units.training, units.trained
    if not share.has_gradients:
        # Those of the first units are to come.
        made, whole = made - units.late, whole - units.trained_first
        made, whole = made * moment.is_early, whole * moment.is_early
    owns = {
        "weights": units.training * stored + (units.owned - units.training) * frozen,
        "gradients": 0.0 if sums else made * stored,
        "moments": units.moments * (BYTES["bfloat16"] if narrow else stored),
    }
    held = units.unsharded
    if not plan.reshard_after_forward:  # A backward that reduces frees them.
        held += units.first if moment.is_early and not sums else units.whole
    return {
        "stored": {} if plan.cpu_offload else owns,
        "host": owns if plan.cpu_offload else {},
        "gathered": _gathered(plan, units, moment),
        "accumulated": {
            "sums of gradients": sums * whole * reduced,
            "gathered weights": held * compute,
        },
    }


def _gathered(plan: Plan, units: _Units, moment: Moment) -> Lines:
    """Returns FSDP's units that are whole. A pipeline reduces when no activations are left."""
    dims, frees, (_, compute, reduced) = plan.dims, plan.reshard_after_forward, plan.widths
    reduces_here = dims.pp == 1
    if moment is LOSS:
        return {"weights of the output layer, twice": frees * 2 * units.output[0] * compute}
    if moment is EMBEDDING:
        weights, made = units.embedding
        return {
            "gradients of the embedding": made * compute,
            "its weights, or its gradients in reduction": max(
                frees * weights * compute, reduces_here * made * reduced
            ),
        }
    # In the feed-forward, experts' gradients come at once, others one by one.
    own, made = units.layer, units.gradients if moment.in_attention else units.routed
    reduces = units.gradients
    if dims.tp * dims.ep * dims.etp > 1:  # Experts are units of their own.
        if moment.in_attention:
            own, made, reduces = units.dense, units.dense, units.routed
        elif plan.device_type == "cpu":  # A GPU has two reductions under way.
            reduces = units.dense
    two = own + units.layer
    if moment.is_early:  # Before the first layer lies the embedding.
        two = max(two, units.first_layer + units.embedding[0])
    elif not moment.in_attention:  # After the last one, multi-token prediction and the output.
        two = max(two, units.ahead + units.layer)
        reduces = max(reduces, units.output[1])
    if dims.pp > 1 or plan.accumulation == "keep_gathered":  # Matrices are added up one by one.
        made /= 3
    halves = plan.job.parallelism.expert_parallel_overlap and not moment.in_attention
    return {
        "weights of two units": frees * two * compute,
        "gradients of a layer": made * compute,
        "experts' gradients of a second half": halves * units.routed * compute,
        "gradients in reduction": reduces_here * reduces * reduced,
    }


def _logits(plan: Plan, share: Share, sizes: Sizes) -> Lines:
    """Returns the bytes of a chunk's logits and of the output layer's gradients, at the loss."""
    config, training, dims = plan.config, plan.job.training, plan.dims
    _, compute, reduced = plan.widths
    if "output" not in share.parts:
        return {}
    tokens = share.sequences * training.seq_len / dims.cp
    vocabulary, depths = config.vocab_size / dims.tp, 1 + config.num_mtp_layers
    chunk = training.loss_chunk_size
    in_chunk = min(tokens, LOSS_CHUNKS[plan.device_type] if chunk is None else chunk or tokens)
    # Gradients of a chunk's logits take their place, on a GPU alone. A cap holds the logits as they
    # were, and its slope.
    copies = 3 if config.logit_cap else 1 if plan.device_type == "cuda" else 2
    adds_up = depths * tokens > in_chunk
    weight = vocabulary * config.dim * any(sizes.trained["output"])
    return {
        "logits of a chunk": copies * in_chunk * vocabulary * compute,
        "gradients of the output layer's weight": (
            share.losses * weight * (reduced if adds_up else compute)
        ),
        "gradients of its input": share.losses * tokens * depths * config.dim * compute,
    }


def _moments(plan: Plan, trained: dict[str, Size]) -> float:
    """Returns the number of moments of what trains."""
    inside = sum(sum(size) for n, size in trained.items() if n.startswith(("layers.", "mtp")))
    return 2 * sum(map(sum, trained.values())) - inside * (plan.job.optimizer.name == "Muon")


def _symmetric_memory(plan: Plan) -> Lines:
    """Returns the bytes of three buffers, two to send from and one to receive in."""
    num_rows = 3.0 * plan.exchange_rows
    if not num_rows:
        return {}
    return {
        "buffers of rows": num_rows * plan.config.row_dim * plan.widths[1],
        "routing weights, in 64 bytes each": num_rows * 64,
    }


def _skewed(plan: Plan, sizes: Sizes, tokens: float, skew: float) -> tuple[float, float]:
    """Returns the most rows that a rank's experts get, as a multiple of an even share: `skew`, or
    what bounded buffers hold; symmetric memory without a bound holds all that can come. And the
    elements for each token of the experts of a rank that borrowed as many as it has."""
    moe, dims, factor = plan.config.moe, plan.dims, plan.dispatch.capacity_factor
    if moe is None or dims.ep == 1:
        return 1.0, 0.0
    if plan.dispatch.name == "balanced":
        routed = max(size.routed for size in sizes.whole.values()) / (dims.ep * dims.etp)
        return 1.0, 2 * routed / tokens * (skew > 1)
    if plan.dispatch.name != "symmetric":
        factor = factor or skew
    num_tokens = max(round(tokens), 1)
    most = rows_of_buffers(num_tokens, moe.top_k, moe.num_experts, dims.ep, factor)
    return max(most / (num_tokens * moe.top_k), 1.0), 0.0


def _activations(
    plan: Plan, share: Share, moment: Moment, layers: Mapping[int, LayerValues]
) -> Table:
    """Returns the elements of a token that layers keep, and those that the backward of one has
    besides. `layers`: by the first layer of a kind."""
    config, every = plan.config, plan.job.activation_checkpoint.every
    kept: Counter[str] = Counter()
    layer: Lines = {}
    for kind, passes in share.passes.items():
        own = layers[kind]
        passes = max(passes - moment.is_early * share.through.get(kind, 0), 0)
        num_recomputed = -(-passes // every) if every else 0
        for number, how, lines in (
            (num_recomputed, "recomputed", own.recomputed),
            (passes - num_recomputed, "other", own.others),
        ):
            if number:
                kept.update({f"{name} of {how} layers": number * n for name, n in lines.items()})
        if moment in (LOSS, EMBEDDING):
            continue
        here = own.values | (own.in_attention if moment.in_attention else own.in_feed_forward)
        if not num_recomputed:
            here["values that are kept already"] = -_total(own.others)
        layer = max(layer, here, key=_total)
    kept["inputs and outputs of stages"] = share.streams * config.dim * config.streams
    return {"kept": dict(kept), "layer": layer}
