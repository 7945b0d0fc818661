"""Steps whose update is left out, and the run's answer to them: stop or skip.

A step is bad if its loss or gradient norm is not finite, or if the norm is a spike. Both are known
before the update, from the step's own all-reduce, and are the same on every rank: all ranks decide
alike, and the decision needs no collective.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from statistics import median
from typing import Any, Literal

from titan_moe.config.job_config import Training
from titan_moe.training.train_step import StepResult

WINDOW = 64
"""The number of norms, of the last steps that made their update, that a norm is compared with."""
FEWEST = 16
"""No step is a spike before there are so many norms."""
MOST_SKIPPED = 16
"""Steps skipped in a row. After more of them, the norms have another level, or the weights are
bad."""


@dataclass(frozen=True)
class Decision:
    """The run's answer to a bad step."""

    seen: str
    """The step's problem, in words for the user."""
    action: Literal["stop", "skip"]
    remark: str
    """The consequence or a remedy, in words for the user."""


class BadSteps:
    """Keeps the gradient norms of earlier steps, and decides about a bad step.

    A norm is a spike if it is more than training.spike_factor times the median of the last WINDOW
    norms. Only steps that made their update count, so that a spike does not hide the next.
    """

    def __init__(self, training: Training) -> None:
        self._factor = training.spike_factor
        self._on_spike, self._on_nonfinite = training.on_spike, training.on_nonfinite
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._skipped = 0

    def is_spike(self, norm: float) -> bool:
        """Returns whether a step of this norm must not update."""
        if self._factor is None or len(self._norms) < FEWEST:
            return False
        return norm > self._factor * median(self._norms) > 0

    def accept(self, result: StepResult) -> None:
        """Take note of a step that made its update."""
        self._skipped = 0
        if self._factor is not None and result.num_targets:
            self._norms.append(result.grad_norm)

    def decide(self, step: int, result: StepResult, place: str) -> Decision:
        """Decide about a bad step, and count the decision.

        Args:
            place: where the first value was that is not finite; unused for a spike.
        """
        if result.finite:
            usual = median(self._norms)
            seen = (
                f"step {step}: a spike: gradient norm {result.grad_norm:.4g}, "
                f"{result.grad_norm / usual:.3g} times the median {usual:.4g} of the last "
                f"{len(self._norms)} (training.spike_factor={self._factor:g})"
            )
            policy, key = self._on_spike, "training.on_spike"
        else:
            numbers = f"loss {result.loss}, gradient norm {result.grad_norm}"
            seen = f"step {step}: {numbers}: {place}"
            policy, key = self._on_nonfinite, "training.on_nonfinite"
        if policy == "stop":
            return Decision(seen, "stop", f"{key}='skip' would leave the update out and go on")
        if self._skipped == MOST_SKIPPED:
            remark = (
                f"{key}='skip' has left out the {MOST_SKIPPED} steps before it too: go back with "
                "checkpoint.load_step, or choose another learning rate or training.spike_factor"
            )
            return Decision(seen, "stop", remark)
        self._skipped += 1
        return Decision(seen, "skip", "the update is skipped")

    def record(
        self, result: StepResult, decision: Decision, worst: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Returns a bad step, its worst sequences and the decision, for events.jsonl."""
        return {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "event": "spike" if result.finite else "nonfinite",
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "median_grad_norm": median(self._norms) if self._norms else None,
            "decision": decision.action,
            "line": f"{decision.seen}; {decision.remark}",
            "worst_sequences": worst,
        }

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, JSON-able; empty if it is the initial one."""
        state = {"norms": list(self._norms), "skipped": self._skipped}
        kept = {key: value for key, value in state.items() if value}
        return {"bad_steps": kept} if kept else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over the state of a checkpoint; the initial one if the checkpoint has none."""
        kept = state.get("bad_steps", {})
        self._norms = deque(map(float, kept.get("norms", [])), maxlen=WINDOW)
        self._skipped = int(kept.get("skipped", 0))
