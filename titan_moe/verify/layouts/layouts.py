"""Layouts by arithmetic: which exist, how one is written on a command line, and applied to a job.

No torch here, and no mesh of titan_moe.distributed: the gate must not depend on what it tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
AXES = (*DENSE_AXES, "ep", "etp")

V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
"""Rank r holds stages r and 2 pp - 1 - r; with the others it holds r, r + pp, r + 2 pp, ..."""
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SCHEDULES)
OPTIONS: dict[str, tuple[str, ...]] = {
    "schedule": ("1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS", *SPLIT_BACKWARD),
    "recompute": ("none", "full", "2", "op"),
    "cp_method": ("allgather", "ulysses", "ring"),
    "cp_balancer": ("headtail", "none"),
    "reshard": ("default", "always", "never"),
    "dispatch": ("standard", "deduplicated", "nodes", "balanced", "bounded", "symmetric"),
    "accumulation": ("reduce_each", "keep_unsharded", "keep_gathered"),
}
"""Options of a layout besides its degrees; `recompute=2` is every second layer,
`dispatch=nodes` the deduplicating one with two ranks of an ep group on a node."""
OPTION_KEYS = {
    "schedule": "pipeline_parallel_schedule",
    "cp_method": "context_parallel_rotate_method",
    "cp_balancer": "context_parallel_load_balancer",
    "reshard": "fsdp_reshard_after_forward",
}
"""The options that are values of a key of [parallelism]."""
SEQ_LEN = 48
"""Tokens of the gate's sequences: 2 cp and cp x tp divide it up to 8 ranks, and at 3 and 6."""
_ONE_STAGE_A_RANK = ("1F1B", "GPipe")


@dataclass(frozen=True)
class Layout:
    """Degrees of every axis, and the options that vary over layouts."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    schedule: str = "1F1B"
    recompute: str = "none"
    cp_method: str = "allgather"
    cp_balancer: str = "headtail"
    reshard: str = "default"
    dispatch: str = "standard"
    accumulation: str = "reduce_each"

    def size(self, axis: str) -> int:
        return int(getattr(self, axis))

    @property
    def world_size(self) -> int:
        return prod(self.size(axis) for axis in DENSE_AXES)

    @property
    def edp(self) -> int:
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks; 1 without a pipeline."""
        if self.pp == 1:
            return 1
        return self.pp * (1 if self.schedule in _ONE_STAGE_A_RANK else 2)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of more than one rank."""
        return tuple(axis for axis in AXES if self.size(axis) > 1)

    def has(self, option: str) -> bool:
        """Says whether an option makes a difference in this layout."""
        if option == "schedule":
            return self.pp > 1
        if option == "dispatch":
            return self.ep * self.etp > 1
        if option == "accumulation":
            return self.pp == 1 and self.world_size > 1
        return self.cp > 1 or option not in ("cp_method", "cp_balancer")

    def __str__(self) -> str:
        """The text that `parse` reads back: axes above 1 and the options that matter."""
        degrees = [f"{axis}={self.size(axis)}" for axis in self.axes] or ["dp_shard=1"]
        options = [f"{option}={getattr(self, option)}" for option in OPTIONS if self.has(option)]
        return ",".join([*degrees, *options])


def legal_layouts(world_size: int) -> list[Layout]:
    """Every way to lay `world_size` ranks out, with the default options."""
    degrees = [d for d in range(1, world_size + 1) if world_size % d == 0]
    return [
        Layout(*dense, ep, etp)  # type: ignore[arg-type, call-arg]
        for dense in product(degrees, repeat=len(DENSE_AXES))
        if prod(dense) == world_size
        for ep, etp in product(degrees, repeat=2)
        if prod(dense[2:]) % (ep * etp) == 0
    ]


def parse(text: str, dispatchers: Sequence[str] = ()) -> Layout:
    """A layout as written by a user: "dp_shard=2,tp=2,ep=4,recompute=full".

    Raises ConfigError with a line for a word that is no axis, no option or no value of one.

    Args:
        dispatchers: values of dispatch beside the built-in ones.
    """
    known = {field.name for field in fields(Layout)}
    choices = OPTIONS | {"dispatch": (*OPTIONS["dispatch"], *dispatchers)}
    values: dict[str, Any] = {}
    for word in filter(None, map(str.strip, text.split(","))):
        key, _, value = word.partition("=")
        if key not in known:
            raise ConfigError(f"{text!r}: {key!r} is unknown: choose {', '.join(sorted(known))}")
        if key in choices:
            if value not in choices[key]:
                raise ConfigError(f"{text!r}: {key}={value}: choose {', '.join(choices[key])}")
            values[key] = value
        elif value.isdecimal() and int(value) > 0:
            values[key] = int(value)
        else:
            raise ConfigError(f"{text!r}: {key}={value} must be a positive number")
    layout = Layout(**values)
    block = layout.dp_shard * layout.cp * layout.tp
    if block % (layout.ep * layout.etp):
        raise ConfigError(
            f"{text!r}: ep {layout.ep} x etp {layout.etp} must divide dp_shard "
            f"{layout.dp_shard} x cp {layout.cp} x tp {layout.tp} = {block}"
        )
    return layout


def depth(layout: Layout) -> int:
    """Layers of the model that a layout is proven on: the fewest that fill its stages."""
    return max(3, layout.num_stages)


def stages(layout: Layout) -> list[list[str]]:
    """The modules of each pipeline stage; one layer each, and the last takes what is left."""
    if layout.pp == 1:
        return []
    modules = [[f"layers.{stage}"] for stage in range(layout.num_stages)]
    modules[0].insert(0, "tok_embeddings")
    modules[-1] += [f"layers.{layer}" for layer in range(layout.num_stages, depth(layout))]
    modules[-1] += ["norm", "output"]
    return modules


def num_sequences(layout: Layout) -> int:
    """Sequences of a global batch: 16, or the fewest above it that give each rank two
    microbatches."""
    step = 2 * layout.data_ranks
    return -(-16 // step) * step


Tables = Mapping[str, Mapping[str, Any]]
"""Values by table and key of a configuration."""


def apply_layout(job: JobConfig, layout: Layout, tables: Tables | None = None) -> JobConfig:
    """The job in a layout, with its batch sizes; `tables` override both."""
    return job.with_values(**layout_tables(layout)).with_values(**(tables or {}))


def layout_tables(layout: Layout) -> dict[str, dict[str, Any]]:
    """The layout as tables of a JobConfig.

    A data rank takes its sequences as two microbatches; under a pipeline as two runs of the
    schedule where they suffice for that, with as few microbatches as the schedule allows.
    """
    own = num_sequences(layout) // layout.data_ranks
    local_batch, microbatch = own // 2, 1
    if layout.pp > 1:
        fewest = layout.num_stages
        runs = 2 if own >= 2 * fewest else 1
        local_batch = max(own // runs, fewest)
        microbatch = local_batch // fewest
    recompute: dict[str, Any] = {"mode": layout.recompute}
    if layout.recompute not in ("none", "full"):
        recompute = {"mode": "selective", "selective_ac_option": layout.recompute}
    return {
        "parallelism": {
            "pipeline_parallel_degree": layout.pp,
            "data_parallel_replicate_degree": layout.dp_replicate,
            "data_parallel_shard_degree": layout.dp_shard,
            "context_parallel_degree": layout.cp,
            "tensor_parallel_degree": layout.tp,
            "expert_parallel_degree": layout.ep,
            "expert_tensor_parallel_degree": layout.etp,
            "fsdp_accumulation": layout.accumulation if layout.pp == 1 else "auto",
            "pipeline_parallel_microbatch_size": microbatch,
            # Named only where the layers leave a choice: production's own split is tried as well.
            "module_fqns_per_model_part": (
                stages(layout) if 1 < layout.num_stages < depth(layout) else None
            ),
            **{key: getattr(layout, option) for option, key in OPTION_KEYS.items()},
            **_dispatch(layout),
        },
        "activation_checkpoint": recompute,
        "training": {
            "local_batch_size": local_batch,
            "global_batch_size": num_sequences(layout),
            "seq_len": SEQ_LEN,
        },
    }


def _dispatch(layout: Layout) -> dict[str, Any]:
    if not layout.has("dispatch"):
        return {}
    if layout.dispatch == "bounded":
        # Each buffer holds nearly all rows of a rank: they never overflow, and are watched.
        return {"expert_parallel_capacity_factor": 0.97 * layout.ep if layout.ep > 1 else 1.0}
    if layout.dispatch == "nodes":
        on_node = 2 if layout.ep % 2 == 0 else 1
        return {
            "expert_parallel_comm_backend": "deduplicated",
            "expert_parallel_ranks_per_node": on_node * layout.etp,
        }
    return {"expert_parallel_comm_backend": layout.dispatch}


def with_options(layout: Layout, **options: str) -> Layout:
    """The layout with some options fixed; those that make no difference to it are left alone."""
    return replace(layout, **{key: value for key, value in options.items() if layout.has(key)})  # type: ignore[arg-type]
