"""What an explanation of a step holds; figures are per target token of the step, as its log's."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figures:
    """Loss and gradient norm of a step."""

    loss: float
    norm: float
    """Before clipping, the 2-norm."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


@dataclass(frozen=True)
class Part:
    """A sequence, or the targets of a document in it."""

    row: int
    """The sequence's number in the global batch."""
    document: int | None
    """The document's number in the sequence; None: the whole sequence, or its balance losses."""
    name: str
    targets: int
    loss: float
    """Mean cross-entropy of its targets; NaN without any."""
    norm: float
    """Of its own gradient."""
    share: float
    """Of the step's squared norm, along the step's gradient: shares of all parts add up to 1."""

    @property
    def weight(self) -> float:
        """What parts are ordered by."""
        return self.share if math.isfinite(self.share) else self.norm


@dataclass(frozen=True)
class Token:
    """A target."""

    row: int
    position: int
    name: str
    """Its document."""
    before: str
    """The text that leads to it."""
    text: str
    loss: float


@dataclass(frozen=True)
class Layer:
    """The gradient of a block, of the embedding, of the final norm or of the output layer."""

    name: str
    norm: float
    share: float
    """Of the step's squared norm."""
    usual: float
    """Its norm in the steps that this one is compared with; NaN if there is none."""
    largest: str
    """The parameter with most of it."""
    without: float
    """The step's norm without it."""


@dataclass(frozen=True)
class Expert:
    """The gradient and the load of a routed expert."""

    layer: str
    expert: int
    norm: float
    share: float
    usual: float
    load: int
    """Tokens that it was given."""
    usual_load: float
    even_load: float
    from_rows: list[tuple[int, int]] = field(default_factory=list)
    """The sequences that most of them come from, and how many."""
    without: float = math.nan
    """The step's norm without the expert's own gradient."""

    @property
    def name(self) -> str:
        return f"{self.layer} expert {self.expert}"


@dataclass(frozen=True)
class Without:
    """The step made again with something left out."""

    what: str
    figures: Figures
    documents: int = 0
    """How many of the worst were left out."""


@dataclass(frozen=True)
class Explanation:
    """What is known of a step. Lists begin with what weighs most."""

    run: str
    step: int
    start: str
    """What was made again from."""
    now: Figures
    targets: int
    logged: Figures | None
    """By the run's own log, if it logged the step."""
    usual: Figures
    """The median of the steps before."""
    usual_of: str
    """Which steps those are."""
    compared_with: str
    """What layers and experts are compared with."""
    limit: Figures
    """Beyond it a step is unusual."""
    following: Figures | None
    """The next step's batch on the same weights; None where the data ends."""
    notes: list[str]
    """Why this may not be the step that the run made."""
    rows: list[Part]
    documents: list[Part]
    num_documents: int
    """In all; of the others in the lightest sequences only the losses are known."""
    tokens: list[Token]
    layers: list[Layer]
    experts: list[Expert]
    without: list[Without]
    needed: int | None
    """So many of the worst documents, left out, make the step a usual one; None: no number that was
    tried, or nothing to mend."""

    @property
    def is_unusual(self) -> bool:
        return not within(self.now, self.limit)

    def as_json(self) -> dict[str, Any]:
        """What is not finite is null."""
        found: dict[str, Any] = _finite(asdict(self))
        return found


def within(figures: Figures, limit: Figures) -> bool:
    """Whether both are at most as large; what is not finite is not."""
    return figures.loss <= limit.loss and figures.norm <= limit.norm


def heaviest_first(weight: float) -> float:
    """The key to sort by: what is not finite comes first."""
    return -weight if math.isfinite(weight) else -math.inf


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
