"""Estimates by arithmetic what a run keeps in a GPU's memory. Imports no torch.

The worst of a few moments of a step counts. A pipeline's rank is counted with all its stages
gathered, which is an upper bound. Tests lay it beside the tensors of steps, docs/benchmarks.md
beside peaks of other programs; a run logs what it measures beside it.
"""

from dataclasses import asdict, dataclass

from titan_moe.parallelize.memory_table import SKEW, tables
from titan_moe.parallelize.plan import Plan
from titan_moe.runtime.gpus import GIB

_UNITS = {"GiB": GIB, "MiB": 2**20}
RESERVED = 3 * GIB
"""Memory for CUDA's context and kernels, and for a fragmented allocator."""
MARGIN = 4 * GIB
"""Memory that shipped configurations and "auto" leave, while no GPU has confirmed the estimate."""
_TENSORS = ("stored", "gathered", "kept", "layer", "logits", "accumulated", "exchange")
"""Fields of `Memory` that are tensors on the GPU."""
_NAMES = {"layer": "one layer", "exchange": "symmetric memory"}


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    moment: str
    """The moment of a step at which a rank needs most."""
    stored: float
    """This rank's shard of weights, moments of what trains, and gradients as far as they are
    made."""
    gathered: float
    """Weights of two units, gradients of one before and while they are reduced. Where experts are
    reduced apart, two reductions are under way; where rows travel in two halves, each half makes
    gradients of the experts."""
    kept: float
    """Values that the forward keeps for the backward; in a pipeline, of all microbatches between
    the two, and the buffers in which each microbatch arrives."""
    layer: float
    """The recomputed values of one layer, and what its backward has besides: gradients, two copies
    of the rows that go home, or FlashAttention's float32 sums, with 128 more tokens after each
    sequence (`flash_workspace`; `debug.deterministic` may double them)."""
    logits: float
    """Logits of one chunk of the loss, and the output layer's gradients."""
    accumulated: float
    """Sums of gradients that are still to be reduced, in a pipeline or with `Plan.accumulation`
    "keep_gathered", and parameters that stay gathered."""
    exchange: float
    """Symmetric memory of the dispatcher that has some."""
    host: float
    """Bytes in the host's memory for each GPU, which `stored` has moved to."""
    skew: float
    """Activations of a rank whose experts get more than an even share of rows in every layer, or
    as many as bounded buffers hold, or weights of experts that it borrows: what they add to the
    others' terms."""
    communicators: float
    """Buffers of NCCL."""

    @property
    def sizes(self) -> dict[str, float]:
        """All bytes, by field."""
        return {name: size for name, size in asdict(self).items() if name != "moment"}

    @property
    def total(self) -> float:
        """Tensors on the GPU, with even shares of rows."""
        return float(sum(getattr(self, field) for field in _TENSORS))

    @property
    def needed(self) -> float:
        """All that a GPU must have room for."""
        return self.total + self.skew + self.communicators + RESERVED

    def __str__(self) -> str:
        """One line of tensors, in GiB; in MiB where the sum is below 1 GiB."""
        optional = ("layer", "logits", "accumulated", "exchange")
        unit = _UNITS[self.unit]
        terms = [
            f"{_NAMES.get(field, field)} {size / unit:.1f}"
            for field in _TENSORS
            if (size := getattr(self, field)) or field not in optional
        ]
        host = f"; in the host's memory {self.host / unit:.1f}" if self.host else ""
        return f"{' + '.join(terms)} = {self.total / unit:.1f} in {self.moment}{host}"

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


def memory(plan: Plan, skew: float = SKEW) -> Memory:
    """Returns the estimate for one rank: in a pipeline, for the one that needs most. Its experts
    get `skew` times an even share of rows."""
    return max(memory_of_ranks(plan, skew, all_ranks=False), key=lambda rank: rank.needed)


def memory_of_ranks(plan: Plan, skew: float = SKEW, *, all_ranks: bool = True) -> list[Memory]:
    """Returns the estimate for each rank of one pipeline, at the moment when it needs most.
    `all_ranks`: as of `tables`."""
    found: list[Memory] = []
    for rank, moment, table in tables(plan, skew, all_ranks=all_ranks):
        sums = {term: sum(lines.values(), 0.0) for term, lines in table.items()}
        here = Memory(moment, **sums)
        if rank == len(found):
            found.append(here)
        elif here.needed > found[rank].needed:
            found[rank] = here
    return found


def accumulation_line(plan: Plan, estimate: Memory) -> str:
    """Returns a log line on what the microbatches of a step share; empty if a step has one."""
    if plan.microbatches == 1:
        return ""
    kept, unit = estimate.accumulated, estimate.unit
    holds = f", with {kept / _UNITS[unit]:.1f} {unit} of sums and weights" if kept else ""
    return f"{plan.microbatches} microbatches a step: fsdp_accumulation={plan.accumulation}{holds}"
