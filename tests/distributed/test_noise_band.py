"""Layouts stay inside the band of harmless controls, and mistakes do not."""

from dataclasses import replace

import pytest

from tests.support.curves import (
    BFLOAT16,
    Training,
    control_trainings,
    train,
    train_each,
    training_of,
)
from tests.support.mistakes import MISTAKES
from tests.support.paths import DEBUG_CONFIGS
from titan_moe.verify.compare.noise.band import Band, quantities_of
from titan_moe.verify.compare.records import NORM_OF, Curve
from titan_moe.verify.compare.run_spec import RunSpec, parse_run_spec

PLANTED = {
    "float32": (
        "learning rate 2 % off",
        "shared experts dropped",
        "one expert's gradient halved",
        "bias update missing",
    ),
    # The first and the third of float32's are near the edge here: docs/benchmarks.md.
    "bfloat16": (
        "warm-up one step longer",
        "shared experts dropped",
        "one expert's gradient dropped",
        "bias update missing",
    ),
}


def baseline(dtype: str, steps: int) -> RunSpec:
    overrides = (*(BFLOAT16 if dtype == "bfloat16" else ()), ("training.steps", str(steps)))
    return RunSpec(config=DEBUG_CONFIGS / "compare.toml", ranks=1, overrides=overrides)


def planted(spec: RunSpec, dtype: str) -> list[Training]:
    own = training_of(spec)
    mistakes = [MISTAKES[name] for name in PLANTED[dtype]]
    return [replace(own, job=each.job(own.job), alter=each.alter) for each in mistakes]


def train_by_ranks(trainings: list[Training]) -> list[Curve]:
    """In order of their numbers of ranks."""
    found = []
    for ranks in sorted({each.world_size for each in trainings}):
        alike = [each for each in trainings if each.world_size == ranks]
        found += train_each(alike, parameter_norms=True)
    return found


@pytest.mark.slow
def test_a_layout_is_inside_and_mistakes_are_not():
    spec = baseline("float32", steps=4)
    controls = train_by_ranks(control_trainings(spec, 6))
    wrong = train_each(planted(spec, "float32"), parameter_norms=True)
    alone = train(
        training_of(parse_run_spec("layout=dp_shard=2,ep=2", replace(spec, ranks=None))),
        parameter_norms=True,
    )
    curves = [*controls, *wrong]
    assert all(curve.data == controls[0].data for curve in curves)

    with_norms = Band(controls)
    scalars = [q for q in quantities_of(controls[0]) if not q.startswith(NORM_OF)]
    without = Band(controls, quantities=scalars)
    for band in (with_norms, without):
        band_check = band.check(alone)
        assert band_check.inside, band_check
    rate, shared, halved, bias = (without.check(curve) for curve in wrong)
    # The first update shows in the second step's loss; a bias moves loads one step later.
    assert rate.first_outside == 2 and shared.first_outside == 1, rate
    assert halved.first_outside == 1 and halved.quantity == "grad_norm", halved
    assert bias.first_outside == 2, bias
    named = with_norms.check(wrong[2]).quantity
    assert named is not None and named.startswith("norm of layers.2.moe.experts.w"), named
    assert named.endswith("[1]"), named


def test_control_runs_differ_in_order_and_every_second_one_in_layout():
    own, *others = control_trainings(baseline("float32", steps=4), 12)
    assert [each.job.debug.permute_rows for each in (own, *others)] == list(range(1, 13))
    assert [each.world_size for each in (own, *others)] == [1, 2] * 6
    layouts = {str(each.job.parallelism) for each in others if each.world_size == 2}
    assert len(layouts) == 4, "dp_shard=2, tp=2, dp_shard=2 with ep=2, cp=2"


# Forty trainings of 50 steps: beside other work more than the limit of all other tests.
@pytest.mark.timeout(900)
@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layouts_are_inside_and_mistakes_are_not(dtype: str):
    """In bfloat16 only the expert's own norm shows that its gradient was dropped."""
    spec = baseline(dtype, steps=20)
    band = Band(train_by_ranks([training_of(spec), *control_trainings(spec, 24)]))
    for layout in ("dp_shard=2,tp=2,ep=4", "cp=2,tp=2,etp=2", "pp=2,dp_shard=2"):
        candidate = training_of(parse_run_spec(f"layout={layout}", replace(spec, ranks=None)))
        band_check = band.check(train(candidate, parameter_norms=True))
        assert band_check.inside, band_check
    wrong = train_each(planted(spec, dtype), parameter_norms=True)
    for name, curve in zip(PLANTED[dtype], wrong, strict=True):
        band_check = band.check(curve)
        assert not band_check.inside, f"{name}: {band_check}"
