"""Two runs side by side, and the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from titan_moe.verify.records import RunRecord

if TYPE_CHECKING:
    from titan_moe.verify.flips import Flips
    from titan_moe.verify.noise_band import Band, Judgement


class Verdict(Enum):
    """What two runs are to each other."""

    IDENTICAL = "identical bits"
    INSIDE = "inside the noise band"
    DIFFERENT = "different"
    UNJUDGED = "not identical, and without repeats nothing says how much rounding may do"

    @property
    def exit_code(self) -> int:
        return {"IDENTICAL": 0, "INSIDE": 3, "DIFFERENT": 1, "UNJUDGED": 5}[self.name]


@dataclass(frozen=True)
class FirstDifference:
    """Where the candidate left: the band, or the baseline's bits where there is no band."""

    step: int
    quantity: str
    """"loss", "grad_norm", "load of layers.1", "norm of layers.1.attention.wq.weight", ..."""
    baseline: float
    candidate: float
    mean_over: int = 1
    """Steps, this one the last, whose mean is what left the band."""


@dataclass(frozen=True)
class Comparison:
    """Everything that a report of two runs shows."""

    title: str
    baseline: RunRecord
    candidate: RunRecord
    verdict: Verdict
    first: FirstDifference | None = None
    """None if the verdict is IDENTICAL or INSIDE."""
    band: "Band | None" = None
    judgement: "Judgement | None" = None
    caveats: Sequence[str] = field(default_factory=list)
    """What makes the verdict worth less: another device, another torch, fewer steps, ..."""
    flips: "Flips | None" = None
    """Routings that went to other experts, if both runs recorded them."""
    replayed: "Comparison | None" = None
    """The same with the candidate made to route as the baseline did."""
