"""Layouts stay inside the band of harmless controls, and mistakes do not."""

from dataclasses import replace

import pytest

from tests.support.curves import (
    Training,
    control_trainings,
    train,
    train_each,
    training_of,
)
from tests.support.paths import DEBUG_CONFIGS
from titan_moe.distributed.dtensor import local_part
from titan_moe.distributed.parallelize import ShardedModel
from titan_moe.train_step import TrainStep
from titan_moe.verify.compare.noise.band import Band
from titan_moe.verify.compare.records import NORM_OF, Curve
from titan_moe.verify.compare.run_spec import RunSpec, parse_run_spec
from titan_moe.verify.layouts.layouts import with_tables


def baseline(steps: int) -> RunSpec:
    overrides = (("training.steps", str(steps)),)
    return RunSpec(config=DEBUG_CONFIGS / "compare.toml", ranks=1, overrides=overrides)


def drop_shared_experts(sharded: ShardedModel, step_fn: TrainStep) -> None:
    for moe in sharded.moe_layers().values():
        moe.shared_experts = None


def halve_an_expert(sharded: ShardedModel, step_fn: TrainStep) -> None:
    """Halves one expert's gradients before they are reduced; one process holds all experts."""
    named = {name.removesuffix(".block"): moe for name, moe in sharded.moe_layers().items()}
    weights, reduce = list(named["layers.2"].experts.parameters()), step_fn._reduce

    def halve_and_reduce(*args):
        for weight in weights:
            local_part(weight.grad)[1].mul_(0.5)
        return reduce(*args)

    step_fn._reduce = halve_and_reduce


def planted(spec: RunSpec) -> list[Training]:
    """A learning rate 2 % off, no shared experts, half an expert's gradient, no bias update."""
    own = training_of(spec)
    faster = with_tables(own.job, {"optimizer": {"lr": 1.02 * own.job.optimizer.lr}})
    unbiased = with_tables(own.job, {"moe": {"bias_update_speed": 0.0}})
    return [
        replace(own, job=faster),
        replace(own, alter=drop_shared_experts),
        replace(own, alter=halve_an_expert),
        replace(own, job=unbiased),
    ]


def train_by_ranks(trainings: list[Training]) -> list[Curve]:
    """Trains all in order of their numbers of ranks."""
    found = []
    for ranks in sorted({each.world_size for each in trainings}):
        alike = [each for each in trainings if each.world_size == ranks]
        found += train_each(alike, parameter_norms=True)
    return found


def without_norms(curve: Curve) -> Curve:
    scalars = {key: v for key, v in curve.scalars.items() if not key.startswith(NORM_OF)}
    return replace(curve, scalars=scalars)


@pytest.mark.slow
def test_noise_band_holds_layout_and_not_mistakes():
    spec = baseline(steps=4)
    controls = train_by_ranks(control_trainings(spec, 6))
    wrong = train_each(planted(spec), parameter_norms=True)
    alone = train(
        training_of(parse_run_spec("layout=dp_shard=2,ep=2", replace(spec, ranks=None))),
        parameter_norms=True,
    )
    curves = [*controls, *wrong]
    assert all(curve.data == controls[0].data for curve in curves)

    with_norms = Band(controls)
    without = Band([without_norms(curve) for curve in controls])
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
