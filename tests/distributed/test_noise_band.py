"""Layouts stay inside the band of harmless controls, and mistakes do not."""

import pytest

from titan_moe.config.job_config import JobConfig
from titan_moe.config.parse import load_job
from titan_moe.models.registry import model_config
from titan_moe.verify.compare.noise.band import Band, quantities_of
from titan_moe.verify.compare.noise.mistakes import MISTAKES
from titan_moe.verify.compare.noise.runs import (
    Run,
    control_runs,
    setting,
    train,
    train_each,
    with_dtype,
)
from titan_moe.verify.compare.records import NORM_OF
from titan_moe.verify.gradients.fixture import at_depth
from titan_moe.verify.layouts.layouts import parse, with_tables

CONFIG = at_depth(model_config("deepseek_v3", "gate"), 3)
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


def make_job(dtype: str, steps: int) -> JobConfig:
    job = load_job(["--job.config_file", "configs/debug/gate_deepseek_v3.toml"])
    small = {"steps": steps, "global_batch_size": 8, "local_batch_size": 4, "seq_len": 32}
    tables = {
        "training": {**small, "max_norm": 1.0},
        "optimizer": {"lr": 3e-3},
        "lr_scheduler": {"warmup_steps": 3},
    }
    return with_dtype(with_tables(job, tables), dtype)


def planted(job: JobConfig, dtype: str) -> list[tuple[JobConfig, Run]]:
    mistakes = [MISTAKES[name] for name in PLANTED[dtype]]
    return [(mistake.job(job), Run(alter=mistake.alter)) for mistake in mistakes]


@pytest.mark.slow
def test_a_layout_is_inside_and_mistakes_are_not():
    job = make_job("float32", steps=4)
    controls = [(job, run) for run in control_runs(job, CONFIG, 6, most_ranks=1)]
    curves = train_each([*controls, *planted(job, "float32")], CONFIG, parameter_norms=True)
    alone = train(job, CONFIG, Run(parse("dp_shard=2,ep=2")), parameter_norms=True)
    controls, wrong = curves[: len(controls)], curves[len(controls) :]
    assert all(curve.data == controls[0].data for curve in curves)

    with_norms = Band(controls)
    scalars = [q for q in quantities_of(controls[0]) if not q.startswith(NORM_OF)]
    without = Band(controls, quantities=scalars)
    for band in (with_norms, without):
        band_check = band.check(alone)
        assert band_check.inside, band_check.line()
    rate, shared, halved, bias = (without.check(curve) for curve in wrong)
    # The first update shows in the second step's loss; a bias moves loads one step later.
    assert rate.first_outside == 2 and shared.first_outside == 1, rate.line()
    assert halved.first_outside == 1 and halved.quantity == "grad_norm", halved.line()
    assert bias.first_outside == 2, bias.line()
    named = with_norms.check(wrong[2]).quantity
    assert named is not None and named.startswith("norm of layers.2.moe.experts.w"), named
    assert named.endswith("[1]"), named


def test_harmless_runs_differ_in_order_microbatches_and_layout():
    job = make_job("float32", steps=4)
    runs = control_runs(job, CONFIG, 12)
    assert [run.local_batch_size for run in runs[:4]] == [8, 4, 2, None]
    assert len({str(run.layout) for run in runs}) == 4
    orders = {setting(job, run).debug.permute_rows for run in runs}
    assert orders == set(range(1, 13))
    later = control_runs(job, CONFIG, 12, first=101, most_ranks=1)
    assert not orders & {run.order for run in later}
    assert {run.layout.world_size for run in later} == {1}


# Forty trainings of 50 steps: beside other work more than the limit of all other tests.
@pytest.mark.timeout(900)
@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layouts_are_inside_and_mistakes_are_not(dtype: str):
    """In bfloat16 only the expert's own norm shows that its gradient was dropped."""
    job = make_job(dtype, steps=50)
    runs = control_runs(job, CONFIG, 32, most_ranks=2)
    alone = [(job, run) for run in runs if run.layout.world_size == 1]
    in_pairs = [(job, run) for run in runs if run.layout.world_size == 2]
    assert len(alone) + len(in_pairs) == 32
    curves = train_each([*alone, *planted(job, dtype)], CONFIG, parameter_norms=True)
    controls, wrong = curves[: len(alone)], curves[len(alone) :]
    band = Band([*controls, *train_each(in_pairs, CONFIG, parameter_norms=True)])
    for layout in ("dp_shard=1", "dp_shard=2,tp=2,ep=4", "cp=2,tp=2,etp=2", "pp=2,dp_shard=2"):
        curve = train(job, CONFIG, Run(parse(layout)), parameter_norms=True)
        band_check = band.check(curve)
        assert band_check.inside, band_check.line()
    for name, curve in zip(PLANTED[dtype], wrong, strict=True):
        band_check = band.check(curve)
        assert not band_check.inside, f"{name}: {band_check.line()}"
