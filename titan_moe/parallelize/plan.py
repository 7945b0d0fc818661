"""The plan of one layout: every decision that a job leaves open, as finished data.

`policies.make_plan` makes it, once. The builders, the memory estimate, the log and the checks read
it. Imports no torch, and holds none of its objects: a plan needs no process group and no device.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from titan_moe.config.job_config import JobConfig, Training
from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.models.config import ModelConfig
from titan_moe.moe.config import DispatchOptions

BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
"""Type -> bytes of an element."""


class Types(NamedTuple):
    """The names of torch's types that a run computes in."""

    stored: str
    """Type of the parameters that the optimizer updates."""
    compute: str
    """Type of products and activations."""
    reduce: str
    """Type of the gradients that ranks sum."""


def types_of(training: Training) -> Types:
    """Returns a job's types: float64 everywhere if parameters are stored in it."""
    if training.dtype == "float64":
        return Types("float64", "float64", "float64")
    return Types(training.dtype, training.mixed_precision_param, training.mixed_precision_reduce)


@dataclass(frozen=True)
class Plan:
    """A job's layout on a world of ranks: all that depends on more than one key. What one key says
    alone, such as the layers that are recomputed, is read from `job`."""

    job: JobConfig
    """The job of one training stage, for the keys that mean what they say."""
    config: ModelConfig
    """The model's dimensions, with the keys of [moe], [training] and [debug] on top."""
    dims: ParallelDims
    """The degrees, and the world's size."""
    device_type: str
    types: Types

    stages: list[list[str]]
    """The modules of each stage of the pipeline; one stage without a pipeline."""
    stages_of_ranks: list[list[int]]
    """The stages that each rank of a pipeline holds, ascending."""

    dispatch: DispatchOptions
    dispatch_reason: str
    """The reason for the dispatcher if the job leaves it open; else empty."""
    exchange_rows: int
    """Rows of each buffer in symmetric memory; 0 without such buffers."""

    microbatches: int
    """Microbatches of a step; 1 in a pipeline."""
    accumulation: Literal["reduce_each", "keep_unsharded", "keep_gathered"]
    """The resolved `parallelism.fsdp_accumulation`."""
    reshard_after_forward: bool
    """True if FSDP frees a unit's parameters after its forward; applies to all units but the last,
    which the backward needs first."""
    reshard_last: bool
    cpu_offload: bool
    """True if parameters, gradients and moments live in the host's memory, beside a GPU."""

    head_tail: bool
    """True if a rank of cp has tokens of a sequence's head and of its tail."""
    pipelined_tp: bool
    """True if products hide the collectives of tp, part by part."""
    stops_on_overflow: bool
    """True if a step, or a validation, that dropped rows does not count and ends the run."""
    counts_in_documents: bool
    """True if positions count from a document's start, since attention depends on them; else from
    the sequence's."""
    counts_answers: bool
    """True if routers count, and balance, tokens with a target alone: those of conversations, whose
    losses' divisor would else be a part of the tokens summed."""

    @property
    def widths(self) -> tuple[int, int, int]:
        """Returns the bytes of an element of the weights that the optimizer updates, of gathered
        weights and activations, and of gradients that are added up."""
        stored = BYTES[self.types.stored]
        return stored, BYTES[self.types.compute], max(stored, 4)

    @property
    def unsharded(self) -> tuple[bool, bool]:
        """Returns whether a rank holds its part of dense parameters, and of routed experts, alone:
        FSDP's mesh has one rank."""
        dims = self.dims
        dense, routed = (dims.dp_replicate * dims.size(axis) == 1 for axis in ("fsdp", "edp"))
        return dense, routed

    def fits_model_of(self, other: "Plan") -> bool:
        """Returns whether a model built for the other plan can run this one as it is. The stages of
        a pipeline, and buffers in symmetric memory, depend on the length of sequences."""
        fixed, others = (
            (plan.job.parallelism, plan.job.activation_checkpoint, plan.accumulation)
            for plan in (self, other)
        )
        return self.dims.pp == 1 and fixed == others and self.exchange_rows == other.exchange_rows
