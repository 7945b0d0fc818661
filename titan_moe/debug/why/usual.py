"""What a step is compared with: the run's log, and the steps before it that were made again."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from titan_moe.debug.why.findings import Figures
from titan_moe.debug.why.pieces import Sums
from titan_moe.debug.why.run import Run
from titan_moe.train_step import StepResult

MOST_STEPS = 20
_LATEST = 5
# A step is unusual beyond this times the median of the latest steps, if it is also above that by so
# many median deviations of the changes from step to step: those of a curve that falls are small.
_FACTORS = {"loss": 1.1, "norm": 1.5}
_DEVIATIONS = 4.0
# How far rounding may take a step that is made again in another layout.
_ROUNDING = {"float64": 1e-6, "float32": 2e-3, "bfloat16": 6e-2, "float16": 2e-2}


@dataclass(frozen=True)
class Measured:
    """A step that was made again, or another batch on the same weights; per target token."""

    figures: Figures
    norms: Mapping[str, Sequence[float]]
    """Of each parameter's gradient [1], of a stack of experts [E]."""
    counts: Mapping[str, Sequence[float]]
    """Tokens of each expert by MoE layer."""


class Usual(NamedTuple):
    """What the step is held to."""

    figures: Figures
    of: str
    limit: Figures


def from_sums(sums: Sums) -> Measured:
    """A gradient and a loss per target token."""
    divisor = max(sums.num_targets, 1)
    norms = {name: [each / divisor for each in of] for name, of in sums.norms.items()}
    return Measured(Figures(sums.loss / divisor, sums.norm / divisor), norms, sums.counts)


def from_result(result: StepResult, layers: Sequence[str]) -> Measured:
    """A step of training, made with parameter_norms; `layers`: the MoE layers."""
    norms = result.parameter_norms or {}
    norm = math.sqrt(sum(each * each for of in norms.values() for each in of))
    counts = [] if result.counts_LE is None else result.counts_LE.tolist()
    return Measured(Figures(result.loss, norm), norms, dict(zip(layers, counts, strict=False)))


def logged_figures(run: Run, step: int) -> Figures | None:
    """Those of the run's log; what was not finite is NaN."""
    line = run.logged.get(step)
    if line is None or "loss" not in line:
        return None
    loss, norm = (math.nan if line.get(k) is None else line[k] for k in ("loss", "grad_norm"))
    return Figures(float(loss), float(norm))


def usual(run: Run, repeated: Mapping[int, Measured], following: Measured | None) -> Usual:
    """The medians over the latest logged steps before; where none is logged, or the log has another
    norm, over those made again, or else the next batch on the same weights."""
    logged = {step: logged_figures(run, step) for step in sorted(run.logged) if step < run.step}
    known = {step: figures for step, figures in logged.items() if figures and figures.finite}
    words = "logged steps"
    if not known or run.job.training.norm_type != "2":
        known = {step: made.figures for step, made in repeated.items() if made.figures.finite}
        words = "repeated steps"
    steps = list(known)[-MOST_STEPS:]
    if not steps and following is not None:
        return Usual(following.figures, "the next batch", _limit([following.figures]))
    if not steps:
        return Usual(Figures(math.nan, math.nan), "nothing", Figures(math.inf, math.inf))
    values, latest = [known[step] for step in steps], steps[-_LATEST:]
    middle = Figures(
        median(each.loss for each in values[-_LATEST:]),
        median(each.norm for each in values[-_LATEST:]),
    )
    return Usual(middle, f"{words} {latest[0]} to {latest[-1]}", _limit(values))


def _limit(values: Sequence[Figures]) -> Figures:
    def of(numbers: list[float], factor: float) -> float:
        middle = median(numbers[-_LATEST:])
        changes = [b - a for a, b in pairwise(numbers)] or [0.0]
        spread = median(abs(change - median(changes)) for change in changes)
        return max(factor * middle, middle + _DEVIATIONS * spread)

    return Figures(
        of([each.loss for each in values], _FACTORS["loss"]),
        of([each.norm for each in values], _FACTORS["norm"]),
    )


def notes(run: Run, made: Mapping[int, Figures], data: int) -> list[str]:
    """Why what was made again may not be what the run made; empty if the log agrees.

    Args:
        made: figures of the steps made again, this one included.
        data: the sum of the CRC32 of the sequences of this one.
    """
    line, lines = run.logged.get(run.step, {}), []
    if not line:
        lines.append(
            f"step {run.step} itself was not logged (metrics.log_freq, or the run ended in it)"
        )
    if "data" in line and line["data"] != data:
        lines.append(
            f"the run read other sequences in step {run.step}: its log has the checksum "
            f"{line['data']}, these have {data}: it did not go on from this checkpoint's data "
            "position, or its data cannot be read again"
        )
    if run.job.debug.moe_force_load_balance:
        lines.append("debug.moe_force_load_balance deals tokens out by their place in a microbatch")
    if dropped := line.get("dispatch/dropped"):
        lines.append(f"the run dropped {dropped:.1%} of the rows; one process drops none")
    if (first := _first_other(run, made)) is not None:
        lines.append(
            f"step {first[0]} comes out otherwise: {first[1]}: another version of titan_moe, "
            "another device or precision, or steps that the run left out"
        )
    return lines


def _first_other(run: Run, made: Mapping[int, Figures]) -> tuple[int, str] | None:
    training = run.job.training
    wide = training.dtype == "float64"
    bound = _ROUNDING["float64" if wide else training.mixed_precision_param]
    for step in sorted(made):
        logged = logged_figures(run, step)
        if logged is None:
            continue
        pairs = [("loss", made[step].loss, logged.loss)]
        if training.norm_type == "2":
            pairs.append(("gradient norm", made[step].norm, logged.norm))
        for what, here, there in pairs:
            if math.isfinite(here) != math.isfinite(there) or abs(here - there) > bound * abs(here):
                return step, f"{what} {here:.6g} here, {there:.6g} in the log"
    return None
