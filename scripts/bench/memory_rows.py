"""Lays the memory estimate beside peaks that others have published, at their settings.

`memory_rows.toml` has the rows, with our keys that stand for their settings. Allocated memory is
laid beside our tensors, other peaks beside all that a GPU must have room for. Ranks' experts get
even shares of rows; a step has twice as many microbatches as a pipeline has ranks. What theirs has
otherwise is counted from a model's dimensions: nothing is fitted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from titan_moe.config.job_config import DEGREES, JobConfig
from titan_moe.config.parse import tomllib
from titan_moe.models.config import GQAConfig
from titan_moe.models.hf import model_of_job
from titan_moe.parallelize.memory import GIB, Memory, memory
from titan_moe.parallelize.memory_table import Table, tables
from titan_moe.parallelize.plan import Plan
from titan_moe.parallelize.policies import make_plan

BOUND = 0.15
"""Errors beyond it have a reason."""


@dataclass(frozen=True)
class Row:
    """A published peak, or a GPU that was or was not large enough."""

    source: str
    model: str
    gpus: int
    seq_len: int
    gib: dict[str, float]
    """Tensors of the peak, "allocated"; all that the allocator had, "reserved", and that was taken
    of the GPU, "device"; memory that was enough, "fits", or not, "short"."""
    batch: int = 1
    """Sequences of a microbatch."""
    microbatches: int | None = None
    """Microbatches of a step; None: twice as many as a pipeline has ranks."""
    degrees: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    """Dimensions that differ from the flavor's."""
    stages: list[int] | None = None
    """Layers of each stage."""
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other keys, by table."""
    differs: list[str] = field(default_factory=list)
    """Names of `DIFFERENCES` that the other program has."""
    open: str = ""
    """A reason for an error that no difference counts."""


def _read() -> Iterator[Row]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    for group in tomllib.loads(text)["group"]:
        rows, counts, keys = group.pop("rows"), group.pop("counts", [None]), group.pop("keys", {})
        for row in rows:
            own = row.pop("keys", {})
            both = {name: keys.get(name, {}) | own.get(name, {}) for name in keys | own}
            yield from (Row(**group | row, keys=both, microbatches=count) for count in counts)


ROWS = list(_read())


def plan_of(row: Row) -> Plan:
    """Returns our plan that stands for theirs."""
    family, flavor = row.model.split("/")
    pp, batch = row.degrees.get("pp", 1), row.batch
    data_ranks = row.gpus // (pp * row.degrees.get("tp", 1) * row.degrees.get("cp", 1))
    sequences = batch * data_ranks * (row.microbatches or 2 * pp)
    parallelism: dict[str, Any] = {DEGREES[axis]: size for axis, size in row.degrees.items()}
    parallelism["expert_parallel_comm_backend"] = "standard"
    if pp > 1:
        parallelism["pipeline_parallel_microbatch_size"] = batch
        batch *= row.microbatches or 2 * pp
    if row.stages:
        cuts = pairwise([0, *accumulate(row.stages)])
        first, *parts = ([f"layers.{layer}" for layer in range(*cut)] for cut in cuts)
        parts[-1] += ["norm", "output"]
        parallelism["module_fqns_per_model_part"] = [["tok_embeddings", *first], *parts]
    model = {"name": family, "flavor": flavor, "num_mtp_layers": 0}
    training = {"seq_len": row.seq_len, "local_batch_size": batch, "global_batch_size": sequences}
    own = {"model": model, "training": training, "parallelism": parallelism}
    job = JobConfig.model_validate(own).with_values(**row.keys)
    config = replace(model_of_job(job.model), **row.config)
    return make_plan(job, config, row.gpus, device_type="cuda")


def _products(plan: Plan) -> float:
    """Returns the bytes of grouped products' results, and of half of the others'."""
    config, attention, moe = plan.config, plan.config.attention, plan.config.moe
    if moe is None or not isinstance(attention, GQAConfig):
        return 0.0
    grouped = moe.top_k * (2 * moe.hidden_dim + config.dim)
    heads = attention.num_heads + 2 * attention.num_kv_heads
    others = heads * attention.qk_dim + config.dim
    tokens = plan.job.training.local_batch_size * plan.job.training.seq_len
    return 2.0 * tokens * config.num_layers * (grouped + others / 2)


DIFFERENCES = {
    "in_place": ("adds gradients in place, copies nothing between stages", "on the way", -1.0),
    "narrow_sums": ("sums of gradients in bfloat16", "sums of gradients", -0.5),
    "wide_frozen": ("frozen weights in float32", "weights", 1.0),
    "wide_logits": ("logits and their gradients in float32", "logits of a chunk", 3.0),
    "products": ("keeps every second product, and no grouped one", "products", -1.0),
}
"""Differences of other programs: in words, and a line of the estimate that they add so often."""


class Comparison(NamedTuple):
    """A row beside our estimate."""

    row: Row
    estimate: Memory
    more: float
    """Bytes that the row's differences add."""

    def ours(self, kind: str) -> float:
        """Returns the bytes to lay beside theirs."""
        found = self.estimate
        return found.total + found.skew if kind == "allocated" else found.needed

    def error(self, *, counted: bool = False) -> float:
        """Returns ours by theirs, less 1; 0 if both agree on a GPU. `counted`: with the row's
        differences."""
        kind, theirs = next(iter(self.row.gib.items()))
        error = (self.ours(kind) + counted * self.more) / GIB / theirs - 1
        return {"fits": max(error, 0.0), "short": min(error, 0.0)}.get(kind, error)

    @property
    def reasons(self) -> list[str]:
        """The reasons for an error beyond the bound; none within it."""
        beyond, still = (abs(self.error(counted=counted)) > BOUND for counted in (False, True))
        return beyond * (
            [DIFFERENCES[name][0] for name in self.row.differs] + [self.row.open] * still
        )


def compare(row: Row) -> Comparison:
    """Returns a row beside our estimate."""
    plan = plan_of(row)
    sums = [
        (_bytes(table), _bytes(table) + _more(row, plan, table)) for *_, table in tables(plan, 1.0)
    ]
    ours, counted = map(max, zip(*sums, strict=True))
    return Comparison(row, memory(plan, 1.0), counted - ours)


def _bytes(table: Table) -> float:
    return sum(sum(lines.values()) for lines in table.values())


def _more(row: Row, plan: Plan, table: Table) -> float:
    """Returns the bytes that a row's differences add at one moment."""
    lines = {line: size for term in table if term != "skew" for line, size in table[term].items()}
    lines["on the way"] = sum(table["gathered"].values()) + lines["inputs and outputs of stages"]
    lines["products"] = _products(plan)
    found = map(DIFFERENCES.__getitem__, row.differs)
    return sum(lines.get(line, 0.0) * times for _, line, times in found)


def table() -> str:
    """Returns all rows as a table."""
    heads = "model | GPUs | layout | tokens | theirs, GiB | ours | error | theirs has otherwise"
    head = f"| {heads} | error left | published by |\n|---|--:|---|--:|--:|--:|--:|---|--:|---|"
    return "\n".join([head, *(f"| {' | '.join(_cells(compare(row)))} |" for row in ROWS)])


def _cells(found: Comparison) -> Iterator[str]:
    row, words = found.row, {"fits": "fits ", "short": "needs more than "}
    yield ", ".join([row.model, *(f"{name} {value}" for name, value in row.config.items())])
    yield str(row.gpus)
    layout = [f"`{axis}` {size}" for axis, size in row.degrees.items()]
    modes = row.keys["activation_checkpoint"].values()
    yield ", ".join([*layout, *modes, *(f"`lora` {n}" for n in row.keys.get("lora", {}).values())])
    yield f"{row.batch} x {row.seq_len:,}" + f" x {row.microbatches}" * bool(row.microbatches)
    yield ", ".join(f"{words.get(kind, '')}{size:.1f}" for kind, size in row.gib.items())
    yield ", ".join(f"{found.ours(kind) / GIB:.1f}" for kind in row.gib)
    yield f"{found.error():+.0%}"
    yield "; ".join(found.reasons)
    yield f"{found.error(counted=True):+.0%}" if found.reasons and row.differs else ""
    yield row.source
