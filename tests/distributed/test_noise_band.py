"""Layouts stay inside the band of harmless controls, and mistakes do not."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.paths import DEBUG_CONFIGS
from tests.support.trainings import train_curve, train_here
from titan_moe.config.parse import load_job
from titan_moe.distributed.dtensor import local_part
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.training.trainer import Trainer
from titan_moe.verify.compare.control_runs import control_specs
from titan_moe.verify.compare.noise.band import Band, quantities_of
from titan_moe.verify.compare.records import Verdict, read_run
from titan_moe.verify.compare.run_spec import RunSpec, parse_run_spec
from titan_moe.verify.compare.verdict import compare_runs

SPEC = RunSpec(config=DEBUG_CONFIGS / "compare.toml", ranks=1, overrides=(("training.steps", "4"),))


def drop_shared_experts(trainer: Trainer) -> None:
    for moe in trainer.sharded.moe_layers().values():
        moe.shared_experts = None


def drop_a_shared_expert(trainer: Trainer) -> None:
    trainer.sharded.moe_layers()["layers.7"].shared_experts = None


def halve_an_expert(trainer: Trainer) -> None:
    """Halves one expert's gradients before they are reduced; one process holds all experts."""
    layers = trainer.sharded.moe_layers()
    named = {name.removesuffix(".block"): moe for name, moe in layers.items()}
    weights, reduce = list(named["layers.2"].experts.parameters()), trainer.train_step._total

    def halve_and_reduce(*args):
        for weight in weights:
            local_part(weight.grad)[1].mul_(0.5)
        return reduce(*args)

    trainer.train_step._total = halve_and_reduce


@pytest.mark.slow
def test_noise_band_holds_layout_and_not_mistakes(tmp_path: Path):
    controls = [
        train_curve(spec, tmp_path / f"control {number}", words)
        for number, (spec, words) in enumerate(control_specs(SPEC, 6, num_gpus=0))
    ]
    layout = parse_run_spec("layout=dp_shard=2,ep=2", replace(SPEC, ranks=None))
    alone = train_curve(layout, tmp_path / "layout")
    faster = (("optimizer.lr", str(1.02 * SPEC.job().optimizer.lr)),)
    wrong = [
        train_curve(SPEC, tmp_path / "rate", faster),
        train_curve(SPEC, tmp_path / "shared", alter=drop_shared_experts),
        train_curve(SPEC, tmp_path / "halved", alter=halve_an_expert),
        train_curve(SPEC, tmp_path / "bias", (("moe.bias_update_speed", "0"),)),
    ]
    assert all(curve.data == controls[0].data for curve in [*controls, *wrong])

    band = Band(controls, quantities_of(alone))
    assert band.check(alone).first is None, band.check(alone)
    rate, shared, halved, bias = (band.check(curve).first for curve in wrong)
    # The first update shows in the second step's loss; a bias moves loads one step later.
    assert rate.step == 2 and shared.step == 1, rate
    assert halved.step == 1 and bias.step == 2, (halved, bias)
    # The whole norm is furthest out in float32; of gradients it is the expert's own.
    gradients = [name for name in quantities_of(alone) if name.startswith("gradient")]
    named = Band(controls, gradients).check(wrong[2]).first
    assert named.step == 1 and named.quantity == "gradient of layers.2 expert 1", named


BFLOAT16 = {
    "job.config_file": str(DEBUG_CONFIGS / "compare.toml"),
    "training.mixed_precision_param": "bfloat16",
    "training.steps": "2",
    "metrics.log_expert_counts": "true",
    "metrics.log_parameter_norms": "true",
}
CONTROLS = 14
MISTAKES = {
    "halved": (halve_an_expert, "gradient of layers.2 expert 1"),
    "shared": (drop_a_shared_expert, "gradient of layers.7 shared experts"),
}


def train_in_bfloat16(folder: Path) -> None:
    """Trains everything in one process, each run with its sequences in another order."""
    for order, name in enumerate([*map(str, range(CONTROLS + 2)), *MISTAKES]):
        keys = BFLOAT16 | {"job.dump_folder": str(folder / name), "debug.permute_rows": str(order)}
        alter, _ = MISTAKES.get(name, (None, ""))
        words = [word for key, value in keys.items() for word in (f"--{key}", value)]
        train_here(load_job(words), alter=alter)


@pytest.mark.slow
def test_gradients_of_parts_show_mistakes_in_bfloat16(tmp_path: Path):
    run_on_ranks(train_in_bfloat16, 1, tmp_path)
    baseline, *controls, correct = (read_run(tmp_path / str(n)) for n in range(CONTROLS + 2))
    found = compare_runs("correct", baseline, correct, controls=controls)
    assert found.verdict is Verdict.INSIDE, found.lines()
    for name, (_, quantity) in MISTAKES.items():
        found = compare_runs(name, baseline, read_run(tmp_path / name), controls=controls)
        assert found.verdict is Verdict.DIFFERENT, found.lines()
        assert found.first is not None and found.first.quantity == quantity, found.first
