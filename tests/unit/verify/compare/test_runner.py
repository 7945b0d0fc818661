"""The course of a comparison, with a run_train.sh that takes no time."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.stub_runs import COMMON, COMPARE, Stubbed, calls, num_counted, silent, trial
from titan_moe.config.errors import ConfigError
from titan_moe.runtime import launch as device_count
from titan_moe.verify.compare import launch as launching_module
from titan_moe.verify.compare.bisect import bisect
from titan_moe.verify.compare.code_trees import CodeTree
from titan_moe.verify.compare.launch import Launcher, TrainingError
from titan_moe.verify.compare.records import Verdict
from titan_moe.verify.compare.runner import compare
from titan_moe.verify.compare.trial import trial_of

PIN = {"pin_routing": True}


def test_both_runs_start_from_one_seed_and_controls_are_saved_where_bits_agree(launcher):
    found = compare(trial(baseline="revision=main"), launcher, silent)
    assert found.verdict is Verdict.IDENTICAL
    seed, baseline, candidate = calls(launcher)
    assert seed["checkpoint.create_seed_checkpoint"] == "true"
    path = str(launcher.folder / "seed" / "checkpoint" / "step-0")
    for run in (baseline, candidate):
        assert run["checkpoint.initial_load_path"] == path
        assert run["checkpoint.load_only"] == "true"
        assert run["metrics.log_freq"] == "1" and run["metrics.log_expert_counts"] == "true"
        assert run["metrics.log_parameter_norms"] == "true"


def test_rounding_is_inside_the_band_and_another_learning_rate_is_not(launcher):
    found = compare(trial("layout=tp=2"), launcher, silent)
    assert found.verdict is Verdict.INSIDE and found.band is not None
    assert len(found.band.curves) == 1 + 8, "a pass rests on all"
    orders = [run.get("debug.permute_rows") for run in calls(launcher)[3:]]
    assert orders == list("12345678")
    before = len(calls(launcher))
    found = compare(trial("--optimizer.lr 3.06e-3"), launcher, silent)
    assert found.verdict is Verdict.DIFFERENT and found.first is not None
    assert found.first.step == 1
    assert [run["folder"] for run in calls(launcher)[before:]] == ["candidate"], "others stand"


def test_a_clear_failure_needs_few_control_runs(launcher):
    found = compare(trial("--optimizer.lr 6e-3", num_control_runs=8), launcher, silent)
    assert found.verdict is Verdict.DIFFERENT and found.band is not None
    assert len(calls(launcher)) == 3 + 6, "seed, baseline, candidate, six control runs"


def test_pinned_routes_do_not_pass_what_differs_with_free_ones(launcher):
    wrong = "layout=tp=2 --model.name mixtral --moe.z_loss_weight 1"
    found = compare(trial(wrong, "--model.name mixtral", **PIN), launcher, silent)
    assert found.free is not None and found.free.verdict is Verdict.DIFFERENT
    assert found.verdict is Verdict.INSIDE and found.as_json()["exit_code"] == 1
    assert found.outcome is Verdict.DIFFERENT and "but different with free ones" in found.words


def test_pinned_routes_show_what_flips_hide(launcher):
    mixtral = "--model.name mixtral"
    asked = trial(f"layout=tp=2 {mixtral} --optimizer.lr 3.003e-3", mixtral, pin_routing=True)
    assert num_counted(asked, launcher) == 3, "the candidate twice; the seed is no training"
    found = compare(asked, launcher, silent)
    assert found.verdict is Verdict.DIFFERENT and found.as_json()["exit_code"] == 1
    assert found.free is not None and found.free.verdict is Verdict.INSIDE
    runs = {True: [], False: []}
    for run in calls(launcher):
        runs["debug.routing_replay" in run].append(run)
    assert len(runs[False]) == 1 + 2 + 8 and len(runs[True]) == 1 + 6
    assert num_counted(asked, launcher) == 0, "all are found"
    recorded = {run["folder"]: run.get("debug.routing_record") for run in runs[False]}
    routes = {name: str(launcher.folder / name / "routes") for name in ("baseline", "candidate")}
    assert {name: path for name, path in recorded.items() if path} == routes
    assert {run["debug.routing_replay"] for run in runs[True]} == {routes["baseline"]}
    assert [run.get("debug.permute_rows", "0") for run in runs[True]] == list("0123456")
    assert found.flips[0].summary() == (1, 1 / 256, 0.01, 0.25) and len(found.flips) == 7
    line = "tokens: 1, 0.39 % of all layers' (control runs: 0.39 to 2.7 %), mean margin 0.01"
    assert any(line in each for each in found.lines())
    equal = compare(trial(baseline="revision=main", pin_routing=True), launcher, silent)
    assert equal.verdict is Verdict.IDENTICAL and equal.free is not None
    assert len(calls(launcher)) == 18 + 3, "equal bits are not trained again"


@pytest.mark.parametrize("blended", [False, True])
def test_data_that_change_in_place_are_trained_on_again(launcher, tmp_path: Path, blended: bool):
    data, config = tmp_path / "data.jsonl", tmp_path / "own.toml"
    data.write_text('{"text": "one"}\n' * 100)
    named = f'dataset = "json"\ndataset_path = "{data}"\n'
    text = COMPARE.read_text().replace('dataset = "synthetic"\n', "" if blended else named)
    if blended:
        text += f"\n[[training.blend]]\n{named}weight = 1.0\n"
    config.write_text(text)
    same = trial("", "revision=main", replace(COMMON, config=config), num_control_runs=0)
    compare(same, launcher, silent)
    compare(same, launcher, silent)
    assert len(calls(launcher)) == 3, "nothing changed"
    data.write_text('{"text": "two"}\n' * 100)
    compare(same, launcher, silent)
    assert [run["folder"] for run in calls(launcher)[3:]] == ["seed", "baseline", "candidate"]


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("loss = 5", "loss = float('nan') * 5", "baseline: loss of step 1 is not finite"),
        ('"loss": loss, "grad_norm": loss, ', "", "baseline: loss of step 1 is not finite"),
    ],
)
def test_runs_without_a_finite_loss_do_not_pass(launcher, right: str, wrong: str, said: str):
    script = launcher.folder.parent / "code" / "run_train.sh"
    script.write_text(script.read_text().replace(right, wrong))
    with pytest.raises(ConfigError, match=said):
        compare(trial(baseline="revision=main"), launcher, silent)
    with pytest.raises(ConfigError, match=said):
        bisect(trial(baseline="revision=main"), launcher, [], silent)
    finished = [str(launcher.folder / name) for name in ("baseline", "candidate")]
    with pytest.raises(ConfigError, match=r"train it again, as config=.*/config\.toml"):
        bisect(trial(*finished, steps=6), launcher, [], silent)


def test_an_interrupted_comparison_goes_on(launcher):
    def interrupt(line: str) -> None:
        if "control/03" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(trial("layout=tp=2"), launcher, interrupt)
    assert len(calls(launcher)) == 5
    note = launcher.folder / "control" / "02" / "comparison_run.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"seconds": None}))
    assert compare(trial("layout=tp=2"), launcher, silent).verdict is Verdict.INSIDE
    assert [run["folder"] for run in calls(launcher)[5:7]] == ["02", "03"]
    assert len(calls(launcher)) == 12


def test_code_that_changes_meanwhile_is_told(launcher, monkeypatch):
    trees = iter(["a", "a", "a", "b"] + ["b"] * 50)

    def changing(side: str, *_: object) -> CodeTree:
        return CodeTree(launcher.folder.parent / "code", next(trees), "working tree")

    monkeypatch.setattr(launching_module, "code_tree", changing)
    plain = Launcher(launcher.folder)
    with pytest.raises(TrainingError, match="was changed meanwhile"):
        compare(trial("layout=tp=2"), plain, silent)


def test_a_folder_of_something_else_is_left_alone(launcher):
    precious = launcher.folder / "baseline" / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_text("weights")
    with pytest.raises(ConfigError, match="choose another --out"):
        compare(trial("layout=tp=2"), launcher, silent)
    assert precious.read_text() == "weights"


def test_a_run_that_fails_shows_its_last_lines(launcher):
    with pytest.raises(TrainingError) as caught:
        compare(trial("--debug.seed 13"), launcher, silent)
    told = str(caught.value)
    assert "candidate" in told and "exit code 1" in told
    assert "  | error: rank 0: the loss is unlucky" in told.splitlines()


@pytest.mark.parametrize(
    ("candidate", "changes", "said"),
    [
        ("--training.seq_len 64", {}, "tokens per step: 256 and 512"),
        ("--optimizer.lrr 1", {}, "lrr"),
        ("layout=tp=3", {}, "must divide|divisible|multiple|tensor_parallel"),
        ("--training.dataset json --training.dataset_path /no/such", {}, "dataset_path.*/no/such"),
        ("", {}, "baseline='' and candidate='' are the same training"),
        ("layout=tp=2", {"num_control_runs": 3}, "repeats=3: 0, or 4 or more"),
        ("layout=tp=2", {"max_slowdown": 0.1}, "as many ranks, not 1 and 2"),
        ("--optimizer.lr 1", {"max_slowdown": 0.1}, "6 steps, need 10: set --steps"),
        ("--optimizer.lr 1", {"max_memory_growth": 5}, "between 0 and 1: 0.05 is 5 %"),
        ("/", {"max_slowdown": 0.1}, "a finished run is of another hour"),
        ("--debug.moe_force_load_balance true", PIN, "--pin-routing: .*pins routes already"),
        (
            "--model.name qwen3",
            PIN | {"num_control_runs": 3},
            r"(?s)repeats=3: .*--pin-routing: layers is .* in the candidate: choose two",
        ),
        ("layout=tp=2", PIN | {"steps": 10**9}, "the routes of 2 runs take .* GB, .* GB free"),
    ],
)
def test_mistakes_are_told_before_anything_runs(launcher, candidate: str, changes: dict, said: str):
    with pytest.raises(ConfigError, match=said):
        compare(trial(candidate, **changes), launcher, silent)
    assert not calls(launcher)


@pytest.mark.parametrize(
    "nodes", [{"SLURM_JOB_NUM_NODES": "2"}, {launching_module.EVERY_NODE: "env all", "NNODES": "2"}]
)
def test_more_ranks_than_gpus_are_told_before_anything_runs(launcher, nodes: dict, monkeypatch):
    monkeypatch.setattr(device_count, "count_gpus", lambda _: 4)
    for name, value in nodes.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NGPU", raising=False)
    default = trial_of("x", COMMON, "", "ranks=1", num_control_runs=0).baseline
    assert default.world_size == 8, "all of both nodes"
    with pytest.raises(ConfigError, match=r"ranks=16: 8 GPUs on 2 node\(s\): choose a smaller"):
        compare(trial("ranks=16", num_control_runs=0), launcher, silent)
    assert not calls(launcher)


def test_trainings_are_counted_and_timed_and_finished_ones_are_found(launcher):
    told: list[str] = []
    compare(trial("layout=tp=2"), launcher, told.append)
    note = "test: repeats=8: if the bits differ, their band may be too wide for a verdict: take "
    assert told[0] == f"{note}12 or more"
    assert told[1] == "at most 10 trainings, 8 of them control runs"
    first, *_, last = [line for line in told if line.startswith("training ")]
    assert first.startswith("training 1 of at most 10, baseline: ")
    assert re.match(r"training 10 of at most 10 \(\d+ s to go at most\), control/08: ", last)
    told.clear()
    compare(trial("--optimizer.lr 3.06e-3"), launcher, told.append)
    assert re.match(r"at most 1 trainings, 0 .*; 9 more are found; at most \d+ s at the", told[1])
    (only,) = [line for line in told if line.startswith("training ")]
    assert only.startswith("training 1 of at most 1 (")


def test_without_a_seed_checkpoint_initial_weights_must_agree(launcher):
    same = trial("layout=tp=2", seed=False)
    assert compare(same, launcher, silent).verdict is Verdict.INSIDE
    assert all(run["metrics.log_initial_weights"] == "true" for run in calls(launcher))
    assert "checkpoint.initial_load_path" not in calls(launcher)[0] and len(calls(launcher)) == 10
    with pytest.raises(ConfigError, match="initial weights: b has checksum 0 in baseline, 7 in"):
        compare(trial("--debug.seed 7", seed=False), launcher, silent)


def test_finished_runs_need_no_seed_and_are_compared_bit_by_bit(launcher, tmp_path: Path):
    compare(trial("layout=tp=2", num_control_runs=0), launcher, silent)
    before = len(calls(launcher))
    finished = trial(str(launcher.folder / "candidate"), str(launcher.folder / "baseline"))
    told: list[str] = []
    found = compare(finished, launcher, told.append)
    assert found.verdict is Verdict.UNJUDGED and "only bits are compared" in told[0]
    link, copy = (launcher.folder.parent / name for name in ("again", "copy"))
    link.symlink_to(launcher.folder / "baseline")
    timed = shutil.copytree(link, launcher.folder.parent / "timed")
    with (timed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": 1.0, "time/step": 0.25}\n')
    shutil.copytree(timed, copy)
    for again, first in ((link, finished.baseline.text), (copy, str(timed))):
        with pytest.raises(ConfigError, match=f"{again} is the same run as {first}, or its copy"):
            compare(trial(str(again), first), launcher, silent)
    with pytest.raises(ConfigError, match="--pin-routing trains both runs: name no finished run"):
        compare(trial("layout=tp=2", finished.baseline.text, **PIN), launcher, silent)
    assert len(calls(launcher)) == before


@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_a_finished_run_is_not_trained_over_and_compared_with_itself(launcher, side: str):
    """Another training would replace the finished run, and then be read for both sides."""
    compare(trial("", "--optimizer.lr 6e-3", num_control_runs=0), launcher, silent)
    before, here = len(calls(launcher)), str(launcher.folder / side)
    asked = trial(here) if side == "baseline" else trial("", here)
    with pytest.raises(ConfigError, match=f"{here}: this comparison trains there: choose another"):
        compare(replace(asked, num_control_runs=0), launcher, silent)
    with pytest.raises(ConfigError, match="trains there"):
        controls = [launcher.folder.parent / name for name in "abc"] + [Path(here)]
        compare(trial("layout=tp=2", controls=controls), launcher, silent)
    assert len(calls(launcher)) == before


def test_finished_runs_are_judged_by_finished_controls_or_a_tolerance(launcher):
    compare(trial("layout=tp=2"), launcher, silent)
    wrong = Stubbed(launcher.folder.parent / "wrong")
    compare(trial("--optimizer.lr 3.05e-3", num_control_runs=0), wrong, silent)
    baseline, before = str(launcher.folder / "baseline"), len(calls(launcher))
    sides = {"right": str(launcher.folder / "candidate"), "wrong": str(wrong.folder / "candidate")}
    ways = [
        ({"controls": sorted((launcher.folder / "control").iterdir())[:6]}, Verdict.INSIDE),
        ({"tolerance": {"loss": 1e-4, "grad_norm": 1e-4}}, Verdict.WITHIN),
    ]
    for how, passed in ways:
        found = {
            side: compare(trial(run, baseline, num_control_runs=0, **how), launcher, silent)
            for side, run in sides.items()
        }
        assert [found["right"].verdict, found["wrong"].verdict] == [passed, Verdict.DIFFERENT]
        assert found["right"].outcome.passes and not found["wrong"].outcome.passes
    assert "first beyond 0.0001 at step 1: loss is" in found["wrong"].reasons()[0]
    given = "judged by a tolerance that was given (loss 0.0001, grad_norm 0.0001)"
    assert all(each.caveats[-1].startswith(given) for each in found.values())
    alone = {"tolerance": {"loss": 1e-4}, "num_control_runs": 0}
    found = compare(trial(sides["right"], baseline, **alone), launcher, silent)
    assert found.caveats[-1] == "the tolerance does not judge grad_norm"
    assert len(calls(launcher)) == before


def test_controls_that_cannot_judge_are_refused(launcher):
    compare(trial("layout=tp=2"), launcher, silent)
    baseline, candidate = (str(launcher.folder / side) for side in ("baseline", "candidate"))
    controls = sorted((launcher.folder / "control").iterdir())
    for named, said in (
        (controls[:3], "--controls: 3 finished runs: name 4 or more"),
        ([*controls[:4], controls[0]], "01, or its copy: name another one"),
        ([*controls[:4], Path(candidate)], "candidate, or its copy: name another one"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            compare(trial(candidate, baseline, controls=named), launcher, silent)
    both = {"controls": controls, "tolerance": {"loss": 0.5}}
    with pytest.raises(ConfigError, match="both judge: leave one out"):
        compare(trial(candidate, baseline, **both), launcher, silent)
