"""Verdicts on known curves."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.verdict_cases import STEPS, controls, run
from titan_moe.config.errors import ConfigError
from titan_moe.verify.compare.records import FirstDifference, Verdict, read_run
from titan_moe.verify.compare.verdict import compare_runs


def test_equal_bits_are_identical_with_and_without_controls():
    for given in ([], controls()):
        found = compare_runs("same", run("a"), run("b"), controls=given)
        assert found.verdict is Verdict.IDENTICAL and found.first is None
        assert found.verdict.exit_code == 0 and not found.caveats


@pytest.mark.parametrize("what", ["loss", "load"])
def test_one_other_bit_is_not_identical(what: str):
    other = run("b")
    if what == "load":
        other.loads["layers.1"][4, :2] += [1, -1]
        what = "load of layers.1"
    else:
        other.scalars[what][4] = np.nextafter(other.scalars[what][4], 9)
    found = compare_runs("bit", run("a"), other)
    assert found.verdict is Verdict.UNJUDGED and found.verdict.exit_code == 5
    assert found.first is not None and (found.first.step, found.first.quantity) == (5, what)


def test_rounding_is_inside_the_band_and_a_shift_is_different():
    inside = compare_runs("noise", run("a"), run("b", 1e-4, seed=99), controls=controls())
    assert inside.verdict is Verdict.INSIDE and inside.first is None and inside.band is not None
    shifted = run("c", 1e-4, seed=98)
    shifted.scalars["grad_norm"][10:] *= 1.01
    found = compare_runs("shift", run("a"), shifted, controls=controls())
    assert found.verdict is Verdict.DIFFERENT and found.verdict.exit_code == 1
    assert found.first is not None
    assert (found.first.step, found.first.quantity) == (11, "grad_norm")
    assert found.first.candidate / found.first.baseline == pytest.approx(1.01, rel=1e-3)
    assert "different" in found.lines()[0] and "step 11: grad_norm is" in found.lines()[1]
    assert json.loads(json.dumps(found.as_json()))["verdict"] == "different"


def test_largest_differences_are_said_whatever_the_verdict():
    other = run("b")
    other.scalars["loss"][6] *= 1.02
    other.scalars["grad_norm"][2] *= 0.9
    found = compare_runs("two runs", run("a"), other)
    line = "largest relative difference: loss 0.02 at step 7, grad_norm 0.1 at step 3"
    assert line in found.lines() and found.verdict is Verdict.UNJUDGED
    largest = found.as_json()["largest"]
    assert largest["loss"] == {"step": 7, "relative": pytest.approx(0.02)}
    same = compare_runs("same", run("a"), run("b"))
    assert "largest relative difference: loss 0 at step 1, grad_norm 0 at" in same.lines()[1]
    other.scalars["loss"][9] = math.nan
    found = compare_runs("broken", run("a"), other, controls=controls())
    assert found.largest()["loss"] == (10, math.inf)
    assert found.as_json()["largest"]["loss"]["relative"] is None


def test_other_tokens_and_other_data_are_refused():
    with pytest.raises(ConfigError, match="tokens per step: a has 512, b 1,024"):
        compare_runs("tokens", run("a"), run("b", tokens_per_step=1024))
    stages = [{"from_step": 5, "tokens_per_step": 1024}]
    with pytest.raises(ConfigError, match="a has 512, b 512, from step 5 on 1,024"):
        compare_runs("tokens", run("a"), run("b", stages=stages))
    other = replace(run("b"), data=[7 * step + (step > 3) for step in STEPS])
    with pytest.raises(ConfigError, match="different tokens at step 4"):
        compare_runs("data", run("a"), other)


def test_missing_steps_missing_loads_and_another_device_are_caveats():
    found = compare_runs("short", run("a"), run("b").at(STEPS[:12]), controls=controls())
    assert found.verdict is Verdict.IDENTICAL and found.candidate.steps == STEPS[:12]
    assert any("only 12 steps are in both" in line for line in found.caveats)
    found = compare_runs("blind", run("a"), replace(run("b"), loads={}))
    assert any("not compared: load of layers.1: b did not" in line for line in found.caveats)
    found = compare_runs("device", run("a"), run("b", device="NVIDIA H100", capability="9.0"))
    assert [line.split(":")[0] for line in found.caveats] == ["device", "capability"]


def test_no_common_step_and_other_experts_are_refused():
    later = replace(run("b"), steps=[step + 100 for step in STEPS])
    with pytest.raises(ConfigError, match="no logged step in common"):
        compare_runs("later", run("a"), later)
    fewer = replace(run("b"), loads={"layers.1": np.ones((20, 3))})
    with pytest.raises(ConfigError, match="4 experts in one run, 3 in the other"):
        compare_runs("fewer", run("a"), fewer)


def test_control_runs_of_other_data_are_refused():
    other = [replace(each, data=[1] * 20) for each in controls()]
    with pytest.raises(ConfigError, match="different tokens"):
        compare_runs("data", run("a"), run("b", 1e-4, seed=99), controls=other)


def test_a_band_that_says_nothing_gives_no_verdict():
    wild = [run(f"repeat {i}", 0.3, seed=i) for i in range(1, 8)]
    found = compare_runs("wild", run("a"), run("b", 1e-4, seed=99), controls=wild)
    assert found.verdict is Verdict.UNJUDGED and found.verdict.exit_code == 5
    wide = "the band of the loss is too wide for a verdict: take more --repeats, 12 at least, or "
    assert found.caveats == [f"{wide}fewer --steps"]
    blind = [replace(each, loads={}) for each in controls()]
    moved = run("b")
    moved.loads["layers.1"][4:, :2] += [50, -50]
    found = compare_runs("blind", run("a"), moved, controls=blind)
    assert found.verdict is Verdict.UNJUDGED and "load of layers.1" in found.caveats[-1]


def test_runs_that_are_not_finite_are_not_simply_identical():
    a, b = run("a"), run("b")
    for each in (a, b):
        each.scalars["loss"][4:] = math.nan
    with pytest.raises(ConfigError, match="a: loss of step 5 is not finite"):
        compare_runs("nan", a, b)
    with pytest.raises(ConfigError, match="a: loss of step 5 is not finite"):
        compare_runs("nan", a, run("c", 1e-4, seed=99), controls=controls())


def test_the_first_step_has_its_own_distance_and_the_largest_its_own_step():
    shifted = run("c", 1e-4, seed=98)
    shifted.scalars["loss"][2] *= 1.01
    shifted.scalars["loss"][9] *= 1.5
    found = compare_runs("shift", run("a"), shifted, controls=controls())
    band, check = found.band, found.band_check
    assert band is not None and check is not None and found.first is not None
    assert (found.first.step, check.furthest) == (3, (10, "loss"))
    at_step = band.reaches(found.candidate)["loss"] * band.limit
    assert found.first.distance == pytest.approx(at_step[2])
    assert check.statistic == pytest.approx(at_step[9])
    first, largest, unseen = found.lines()[1:4]
    assert f"that is {at_step[2]:,.3g} times" in first
    assert f"{at_step[9]:,.3g} times" in largest and "at step 10, by loss" in largest
    low, high = band.edges("loss")
    assert f"loss by {math.sqrt(high[-1] / low[-1]) - 1:.1e}" in unseen


def test_renamed_layers_and_more_rows_do_not_pass_in_silence():
    renamed = replace(run("b", 1e-4, seed=99), loads={"layers.2": run("b").loads["layers.1"]})
    found = compare_runs("renamed", run("a"), renamed, controls=controls())
    assert found.verdict is Verdict.INSIDE and found.band is not None
    assert found.band.quantities == ("loss", "grad_norm")
    assert any("not compared: load of layers.1 and 1 more" in line for line in found.caveats)
    twice = replace(run("b"), loads={"layers.1": 2 * run("b").loads["layers.1"]})
    with pytest.raises(ConfigError, match="a sent 1,000 rows to experts, b 2,000"):
        compare_runs("twice", run("a"), twice)


def test_runs_are_read_from_their_files(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [{"step": n, "loss": 1 / n, "grad_norm": None, "data": 5} for n in range(1, 4)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 9')
    counts = [{"step": step, "layers.1": [step, 2, 3]} for step in range(1, 4)]
    (folder / "expert_counts.jsonl").write_text("\n".join(map(json.dumps, counts)))
    norms = [{"step": step, "layers.1.moe.router.gate.weight": [3]} for step in range(1, 4)]
    norms = [line | {"layers.1.attention_norm.weight": [4]} for line in norms]
    (folder / "parameter_norms.jsonl").write_text("\n".join(map(json.dumps, norms)))
    (folder / "config.toml").write_text("[training]\nsteps = 3\n")
    with pytest.raises(ConfigError, match=r"run: there is no run\.json"):
        read_run(folder)
    (folder / "run.json").write_text("{}")
    for path in (folder, folder / "metrics.jsonl"):
        found = read_run(path)
        assert found.name == "run" and found.steps == [1, 2, 3]
        assert found.data == [5, 5, 5] and found.config == {"training": {"steps": 3}}
        assert np.isnan(found.scalars["grad_norm"]).all()
        assert found.loads["layers.1"].tolist()[2] == [3, 2, 3]
        assert found.scalars["gradient of layers.1"].tolist() == [5, 5, 5]
    (folder / "expert_counts.jsonl").write_text(json.dumps(counts[0]) + "\n")
    assert not read_run(folder).loads, "they lack a step"
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no step is logged"):
        read_run(folder)


@pytest.mark.parametrize("quantity", ["loss", "grad_norm", "layers.1"])
def test_nan_of_any_quantity_is_never_inside_the_band(quantity: str):
    broken = run("b", 1e-4, 90)
    held = {**broken.scalars, **broken.loads}[quantity]
    held[6] = math.nan
    found = compare_runs("nan", run("a"), broken, controls=controls())
    assert found.verdict is Verdict.DIFFERENT and found.first is not None and found.first.step == 7
    assert compare_runs("nan", run("a"), broken).verdict is Verdict.UNJUDGED


def test_first_other_bits_are_shown_in_all_digits() -> None:
    found = FirstDifference(1, "loss", 6.740713539336372, 6.740713539336371)
    assert "is 6.7407135393363706 in the candidate, 6.7407135393363724 in the" in found.line()
    assert "is 6.7407135, 6.7407135 in the" in replace(found, tolerance=1e-3).line()
