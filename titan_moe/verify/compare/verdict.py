"""The verdict on two runs: identical bits, inside the noise band of control runs, or different."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from titan_moe.config.errors import ConfigError
from titan_moe.config.training_stages import tokens_in_words
from titan_moe.runtime.revision import code_in_words
from titan_moe.verify.compare.cost import CostCheck
from titan_moe.verify.compare.noise.band import FEWEST_CONTROLS, Band, BandCheck, quantities_of
from titan_moe.verify.compare.pinned_routes import Flips, flip_rows
from titan_moe.verify.compare.records import (
    COMPARED,
    LOAD_OF,
    Array,
    FirstDifference,
    RunRecord,
    Verdict,
    moved_share,
    relative_difference,
)

ENOUGH = 12
"""Control runs that a verdict should rest on. The bound of a band from 7 is several times that of
a band from 24; from 12 it is 1.5 times as large."""
_TOO_WIDE = 0.5
"""The widest useful band of the loss, from edge to edge, as a logarithm."""
_UNEVEN = 100
"""A bound in spreads that shows control runs of several kinds; of one kind it is 5 to 30."""
_ENVIRONMENT = ("torch", "device", "capability")


@dataclass(frozen=True)
class Comparison:
    """The verdict on two runs, and the curves and band that it rests on."""

    title: str
    baseline: RunRecord
    candidate: RunRecord
    verdict: Verdict
    """The verdict on the curves."""
    first: FirstDifference | None = None
    """None if the verdict passes."""
    band: Band | None = None
    band_check: BandCheck | None = None
    caveats: Sequence[str] = field(default_factory=list)
    """Reasons to trust the verdict less: another device, another torch, fewer steps, ..."""
    costs: Sequence[CostCheck] = ()
    """Time and memory, as far as they have limits."""
    free: "Comparison | None" = None
    """The same comparison with free routes, where this one is with pinned routes."""
    flips: Sequence[Flips] = ()
    """Flips of the candidate and of the control runs, with pinned routes."""

    @property
    def outcome(self) -> Verdict:
        """The verdict on the curves, or on a cost that exceeds its limit where the curves pass. Of
        curves with pinned routes: different too where they are with free ones, as a router that
        chooses wrongly makes them."""
        if self.free is not None and self.free.verdict is Verdict.DIFFERENT:
            return Verdict.DIFFERENT
        failed = [cost.verdict for cost in self.costs if cost.verdict is not None]
        if not failed or not self.verdict.passes:
            return self.verdict
        return min(failed, key=lambda verdict: verdict is Verdict.COST_UNJUDGED)

    @property
    def words(self) -> str:
        """The outcome in words, with the verdict on the curves."""
        curves = f"{self.verdict.words}{'' if self.free is None else ' with pinned routes'}"
        free = " with free ones" if self.outcome is Verdict.DIFFERENT else ""
        return (
            curves if self.outcome is self.verdict else f"{curves}, but {self.outcome.words}{free}"
        )

    def lines(self) -> list[str]:
        """Returns lines for a reader, the verdict first."""
        found = [f"{self.title}: {self.words}"]
        for role, run in (("baseline", self.baseline), ("candidate", self.candidate)):
            if code := run.facts.get("code"):
                found.append(f"{role} ran {code_in_words(code)}")
        found += self.reasons()
        largest = [f"{q} {share:.2g} at step {step}" for q, (step, share) in self.largest().items()]
        found.append(f"largest relative difference: {', '.join(largest)}")
        for _, number, share, others, mean, most in flip_rows(self.flips)[:1]:
            found.append(
                f"flipped tokens: {number}, {share} % of all layers' (control runs: {others} %), "
                f"mean margin {mean}, largest {most}"
            )
        if self.free is not None:
            words = [f"with free routes: {self.free.verdict.words}", *self.free.reasons()]
            found.append("; ".join(words))
        return found + [f"CAVEAT: {caveat}" for caveat in self.caveats]

    def reasons(self) -> list[str]:
        """Returns lines: the first difference, the largest one, what the band cannot see, the
        costs."""
        found = [] if self.first is None else [self.first.line()]
        if self.band_check is not None and self.band is not None:
            found += _band_lines(self.band, self.band_check)
        return [*found, *(cost.line() for cost in self.costs)]

    def largest(self) -> dict[str, tuple[int, float]]:
        """Returns the step at which loss and gradient norm differ most, and by what share of the
        baseline's value; infinite where one run alone is finite."""
        first, second = self.baseline, self.candidate
        found = {}
        for quantity in COMPARED:
            share_S = relative_difference(first.scalars[quantity], second.scalars[quantity])
            at = int(np.nan_to_num(share_S, nan=-1.0).argmax())
            found[quantity] = first.steps[at], float(share_S[at])
        return found

    def as_json(self) -> dict[str, Any]:
        """The verdict and its reasons, without the curves."""
        return {
            "title": self.title,
            "verdict": self.outcome.name.lower(),
            "curves": self.verdict.name.lower(),
            "exit_code": self.outcome.exit_code,
            "costs": [cost.as_json() for cost in self.costs],
            "baseline": {"name": self.baseline.name, **self.baseline.facts},
            "candidate": {"name": self.candidate.name, **self.candidate.facts},
            "steps": list(self.baseline.steps),
            "largest": {
                quantity: {"step": step, "relative": share if math.isfinite(share) else None}
                for quantity, (step, share) in self.largest().items()
            },
            "first": None if self.first is None else asdict(self.first),
            "judgement": None if self.band_check is None else asdict(self.band_check),
            "band": None if self.band is None else self.band.as_json(),
            "caveats": list(self.caveats),
            "free": None if self.free is None else self.free.as_json(),
            "flips": [each.summary()._asdict() for each in self.flips],
        }


def compare_runs(
    title: str,
    baseline: RunRecord,
    candidate: RunRecord,
    *,
    controls: Sequence[RunRecord] = (),
    tolerance: Mapping[str, float] | None = None,
    caveats: Sequence[str] = (),
) -> Comparison:
    """Compare two runs at the steps that both logged.

    Args:
        controls: control runs of the baseline; with the baseline itself they make the band.
        tolerance: largest relative differences of scalars, which judge in place of a band.
        caveats: known reasons to trust the verdict less.

    Raises ConfigError for runs that cannot be compared: other data, another number of tokens a
    step, no step or no quantity in common, a baseline that is not finite.
    """
    for other in (candidate, *controls):
        _refuse_other_trainings(baseline, other)
    steps = common_steps(baseline, candidate)
    caveats = [*caveats, *_caveats(baseline, candidate)]
    ours, theirs = baseline.at(steps), candidate.at(steps)
    band = band_check = None
    first = first_other_bits(ours, theirs)
    _refuse_other_rows(ours, theirs)
    verdict = Verdict.IDENTICAL if first is None else Verdict.UNJUDGED
    if first is not None and tolerance:
        first = first_beyond(ours, theirs, tolerance)
        verdict = Verdict.WITHIN if first is None else Verdict.DIFFERENT
        given = ", ".join(f"{quantity} {limit:g}" for quantity, limit in tolerance.items())
        caveats.append(f"judged by a tolerance that was given ({given}), not by control runs")
        if unjudged := [each for each in COMPARED if each not in tolerance]:
            caveats.append(f"the tolerance does not judge {', '.join(unjudged)}")
    elif first is not None and len(controls) >= FEWEST_CONTROLS:
        curves = [ours, *(control.at(steps) for control in controls)]
        band = Band(curves, quantities_of(theirs))
        if unable := _cannot_judge(band, first):
            caveats.append(unable)
            band = None
        else:
            band_check = band.check(theirs)
            first = band_check.first
            verdict = Verdict.INSIDE if first is None else Verdict.DIFFERENT
            caveats += _weaknesses(band) if first is None else []
    return Comparison(title, ours, theirs, verdict, first, band, band_check, caveats)


def _cannot_judge(band: Band, first: FirstDifference) -> str:
    """Returns why a band gives no verdict on a first difference; empty if it does."""
    low, high = band.edges("loss")
    if first.quantity not in band.quantities:
        return f"the control runs do not measure what differs first, {first.quantity}"
    line = f"take more --repeats, {ENOUGH} at least, or fewer --steps"
    is_wide = np.log(high / low).max() > _TOO_WIDE
    return f"the band of the loss is too wide for a verdict: {line}" if is_wide else ""


def first_beyond(
    ours: RunRecord, theirs: RunRecord, tolerance: Mapping[str, float]
) -> FirstDifference | None:
    """Returns the first step at which a scalar's relative difference is not within its
    tolerance."""
    found = []
    for quantity, limit in tolerance.items():
        a_S, b_S = ours.scalars[quantity], theirs.scalars[quantity]
        beyond_S = ~(relative_difference(a_S, b_S) <= limit)
        found += _first_where(ours.steps, quantity, a_S, b_S, beyond_S, tolerance=limit)
    return min(found, key=lambda each: each.step, default=None)


def first_other_bits(ours: RunRecord, theirs: RunRecord) -> FirstDifference | None:
    """Returns the first step at which a number that both have is not the same; the loss before
    other numbers of that step."""
    pairs = {key: (ours.scalars[key], theirs.scalars[key]) for key in COMPARED}
    for layer in [layer for layer in ours.loads if layer in theirs.loads]:
        a_SE, b_SE = ours.loads[layer], theirs.loads[layer]
        if a_SE.shape != b_SE.shape:
            raise ConfigError(
                f"{layer} has {a_SE.shape[1]} experts in one run, {b_SE.shape[1]} in the other"
            )
        moved_S = moved_share(a_SE, b_SE)
        pairs[f"{LOAD_OF}{layer}"] = np.zeros_like(moved_S), moved_S
    found = []
    for quantity, (a_S, b_S) in pairs.items():
        differs_S = ~((a_S == b_S) | (np.isnan(a_S) & np.isnan(b_S)))
        found += _first_where(ours.steps, quantity, a_S, b_S, differs_S)
    return min(found, key=lambda each: each.step, default=None)


def _first_where(
    steps: Sequence[int], quantity: str, a_S: Array, b_S: Array, differs_S: Any, **more: Any
) -> list[FirstDifference]:
    """Returns the first step at which a quantity differs, if there is one."""
    at = int(differs_S.argmax())
    first = FirstDifference(steps[at], quantity, float(a_S[at]), float(b_S[at]), **more)
    return [first] if differs_S[at] else []


def _refuse_other_rows(ours: RunRecord, theirs: RunRecord) -> None:
    """Raises ConfigError for other numbers of rows: loads are compared as shares, which hide
    them."""
    for layer in ours.loads.keys() & theirs.loads.keys():
        a, b = ours.loads[layer][0].sum(), theirs.loads[layer][0].sum()
        if a != b:
            raise ConfigError(
                f"{layer}: {ours.name} sent {a:,.0f} rows to experts, {theirs.name} {b:,.0f}"
            )


def common_steps(ours: RunRecord, theirs: RunRecord) -> list[int]:
    """Returns the steps that both logged. Raises ConfigError without one, or where the first curve
    is not finite at one: bits of NaN may agree, and that says nothing."""
    common = sorted(set(ours.steps) & set(theirs.steps))
    if not common:
        raise ConfigError(
            f"{ours.name} and {theirs.name} have no logged step in common: "
            "run both with metrics.log_freq=1"
        )
    run = ours.at(common)
    for key in COMPARED:
        finite_S = np.isfinite(run.scalars[key])
        if not finite_S.all():
            step = common[int(finite_S.argmin())]
            raise ConfigError(
                f"{run.name}: {key} of step {step} is not finite: compare fewer --steps"
            )
    return common


def _refuse_other_trainings(baseline: RunRecord, candidate: RunRecord) -> None:
    a, b = (_tokens_per_step(run) for run in (baseline, candidate))
    if a != b:
        raise ConfigError(
            f"tokens per step: {baseline.name} has {a}, {candidate.name} {b}: set "
            "training.global_batch_size and training.seq_len alike"
        )
    mine, others = baseline.weights, candidate.weights
    if mine and others and mine != others:
        name = min(name for name, _ in mine.items() ^ others.items())
        raise ConfigError(
            f"initial weights: {name} has checksum {mine.get(name)} in {baseline.name}, "
            f"{others.get(name)} in {candidate.name}: start both from one seed checkpoint (without "
            "seed = false or --no-seed), or with one debug.seed"
        )
    ours, theirs = (dict(zip(run.steps, run.data, strict=True)) for run in (baseline, candidate))
    other = [step for step in ours if step in theirs and ours[step] != theirs[step]]
    if other:
        raise ConfigError(
            f"data: {baseline.name} and {candidate.name} trained on different tokens at step "
            f"{other[0]}: {_sources(baseline)} and {_sources(candidate)}"
        )


def _tokens_per_step(run: RunRecord) -> str:
    """Describes the tokens of a step in words."""
    stages = [{"from_step": 1, **run.facts}, *run.facts.get("stages", [])]
    return tokens_in_words({stage["from_step"]: stage["tokens_per_step"] for stage in stages})


def _sources(run: RunRecord) -> str:
    return "{fingerprint}, seed {seed}".format(**run.facts["data"])


def _caveats(ours: RunRecord, theirs: RunRecord) -> Iterator[str]:
    if set(ours.steps) != set(theirs.steps):
        common = len(set(ours.steps) & set(theirs.steps))
        yield (
            f"only {common} steps are in both: {ours.name} logged {len(ours.steps)} up to step "
            f"{ours.steps[-1]}, {theirs.name} {len(theirs.steps)} up to step {theirs.steps[-1]}"
        )
    if bool(ours.weights) != bool(theirs.weights):
        lacking_one = theirs.name if ours.weights else ours.name
        yield f"initial weights are not compared: {lacking_one} recorded no checksums"
    for key in _ENVIRONMENT:
        a, b = (run.facts[key] for run in (ours, theirs))
        if a != b:
            yield f"{key}: {ours.name} ran on {a}, {theirs.name} on {b}"
    if lacking := sorted(ours.loads.keys() ^ theirs.loads.keys()):
        names = {(theirs if layer in ours.loads else ours).name for layer in lacking}
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        said = f"not compared: {LOAD_OF}{lacking[0]}{more}"
        yield f"{said}: {' and '.join(names)} did not record it"


def _weaknesses(band: Band) -> Iterator[str]:
    """Yields the reasons why the band shows less than it could."""
    number = len(band.curves) - 1
    if number < ENOUGH:
        yield (
            f"the band rests on {number} control runs and is therefore wide: with "
            f"{ENOUGH} or more it shows smaller differences"
        )
    if max(band.bounds.values()) > _UNEVEN:
        yield (
            "few of the control runs lie far from the others (a token went to another expert, and "
            "its effects grew), so the band is far too wide: take more --repeats, or fewer --steps"
        )


def _band_lines(band: Band, check: BandCheck) -> list[str]:
    """Lines on the candidate's largest distance, and on differences that the band cannot see."""
    step, quantity = check.furthest
    widths = []
    for scalar in [q for q in COMPARED if q in band.quantities]:
        low, high = band.edges(scalar)
        widths.append(f"{scalar} by {math.sqrt(high[-1] / low[-1]) - 1:.1e}")
    return [
        f"largest distance of all steps: {check.statistic:,.3g} times as far as rounding takes it "
        f"(limit {check.limit:.3g}), at step {step}, by {quantity}; measured by the baseline and "
        f"{len(band.curves) - 1} control runs, one correct run in {1 / band.false_alarms:,.0f} "
        "fails",
        f"too small to see at the last step: {' or '.join(widths)} of its value",
    ]
