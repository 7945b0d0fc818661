"""The course of a comparison, with a run_train.sh that takes no time."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.paths import DEBUG_CONFIGS
from titan_moe.config.errors import ConfigError
from titan_moe.runtime import launch as device_count
from titan_moe.runtime.device import describe_device
from titan_moe.runtime.revision import package_hash
from titan_moe.verify.compare import goldens
from titan_moe.verify.compare import launch as launching_module
from titan_moe.verify.compare.bisect import bisect
from titan_moe.verify.compare.code_trees import CodeTree
from titan_moe.verify.compare.forecast import Forecast
from titan_moe.verify.compare.launch import Launcher, TrainingError
from titan_moe.verify.compare.outcome import Verdict
from titan_moe.verify.compare.plan import Plan, plan_of
from titan_moe.verify.compare.run_spec import RunSpec, parse_run_spec
from titan_moe.verify.compare.runner import Runner, compare, update_golden

CPU = torch.device("cpu")
COMPARE = DEBUG_CONFIGS / "compare.toml"
COMMON = RunSpec(config=COMPARE, overrides=(("training.steps", "6"),))

STUB = """#!/usr/bin/env python3
import json, os, sys
from pathlib import Path
words = sys.argv[1:]
keys = {a[2:]: b for a, b in zip(words[::2], words[1::2])}
folder = Path(keys["job.dump_folder"])
with open(Path(__file__).with_name("calls"), "a") as calls:
    print(json.dumps({"folder": folder.name, "ranks": os.environ["NGPU"], **keys}), file=calls)
if keys.get("debug.seed") == "13":
    print("torchrun says much")
    print("error: rank 0: the loss is unlucky")
    sys.exit(1)
if "checkpoint.create_seed_checkpoint" in keys:
    seed = folder / "checkpoint" / "step-0"
    seed.mkdir(parents=True)
    seed.joinpath("weights").write_text("w")
    sys.exit()
seed = int(keys.get("debug.permute_rows", "0")) + int(os.environ["NGPU"]) - 1
factor = float(keys.get("optimizer.lr", "3e-3")) / 3e-3
pinned = "debug.routing_replay" in keys
flips = 1000 if keys.get("model.name") == "mixtral" else 0
factor *= 1.5 if "moe.z_loss_weight" in keys and not pinned else 1
lines = []
for step in range(1, int(keys["training.steps"]) + 1):
    own, pins = (((s * 7919 + step * 104729) % 17 - 8) for s in (seed, 0 if pinned else seed))
    noise = 1 + 1e-6 * (own + flips * pins)
    loss = 5 / step * noise * factor
    seconds = 1.3 if keys.get("activation_checkpoint.mode") == "full" else 1.0
    seconds *= 9 if step == 8 else 1
    costs = {"tokens": 8 * step, "tokens_per_second": 8 / seconds, "memory/peak_gib": seconds}
    lines.append({"step": step, "loss": loss, "grad_norm": loss, "data": step, **costs})
if pinned:
    flips = {"step": 1, "queries": 256, "tokens": {"layers.1": seed}}
    flips["margins"] = {"layers.1": [0.01, 0.25]}
    folder.joinpath("routing_flips.jsonl").write_text(json.dumps(flips) + "\\n")
folder.joinpath("metrics.jsonl").write_text("\\n".join(map(json.dumps, lines)))
if "metrics.log_initial_weights" in keys:
    weights = {"a": "00", "b": keys.get("debug.seed", "0")}
    folder.joinpath("initial_weights.json").write_text(json.dumps(weights))
facts = {"tokens_per_step": 8, "world_size": int(os.environ["NGPU"]), "torch": "2"}
facts |= {"device": "cpu", "capability": CAPABILITY, "code": {"sha256": SHA256}}
folder.joinpath("run.json").write_text(json.dumps(facts))
folder.joinpath("config.toml").write_text("[model]\\nname = 'deepseek_v3'\\n")
"""


class Stubbed(Launcher):
    """Every revision is the stub."""

    def code(self, side: RunSpec) -> CodeTree:
        return CodeTree(self.folder.parent / "code", side.revision or "work", side.revision)


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    (tmp_path / "code").mkdir()
    script = tmp_path / "code" / "run_train.sh"
    facts = {
        "CAPABILITY": describe_device(CPU)["capability"],
        "SHA256": package_hash(tmp_path / "code" / "titan_moe"),
    }
    text = STUB
    for name, value in facts.items():
        text = text.replace(name, repr(value))
    script.write_text(text)
    script.chmod(0o755)
    return Stubbed(tmp_path / "out")


def calls(launcher: Launcher) -> list[dict[str, str]]:
    path = launcher.folder.parent / "code" / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def plan(candidate: str = "", baseline: str = "", **changes) -> Plan:
    specs = parse_run_spec(baseline, COMMON), parse_run_spec(candidate, COMMON)
    return replace(Plan("test", *specs, num_control_runs=8), **changes)


PIN = {"pin_routing": True}


def silent(_: str) -> None:
    pass


def test_both_runs_start_from_one_seed_and_controls_are_saved_where_bits_agree(launcher):
    found = compare(plan(baseline="revision=main"), launcher, silent)
    assert found.verdict is Verdict.IDENTICAL
    seed, baseline, candidate = calls(launcher)
    assert seed["checkpoint.create_seed_checkpoint"] == "true"
    path = str(launcher.folder / "seed" / "checkpoint" / "step-0")
    for run in (baseline, candidate):
        assert run["checkpoint.initial_load_path"] == path
        assert run["checkpoint.load_only"] == "true"
        assert run["metrics.log_freq"] == "1" and run["metrics.log_expert_counts"] == "true"


def test_noise_is_inside_and_a_learning_rate_is_not(launcher):
    found = compare(plan("layout=tp=2"), launcher, silent)
    assert found.verdict is Verdict.INSIDE and found.band is not None
    assert len(found.band.curves) == 1 + 8, "a pass rests on all"
    orders = [run.get("debug.permute_rows") for run in calls(launcher)[3:]]
    assert orders == list("12345678")
    before = len(calls(launcher))
    found = compare(plan("--optimizer.lr 3.06e-3"), launcher, silent)
    assert found.verdict is Verdict.DIFFERENT and found.first is not None
    assert found.first.step == 1
    assert [run["folder"] for run in calls(launcher)[before:]] == ["candidate"], "others stand"


def test_a_clear_failure_needs_few_control_runs(launcher):
    found = compare(plan("--optimizer.lr 6e-3", num_control_runs=8), launcher, silent)
    assert found.verdict is Verdict.DIFFERENT and found.band is not None
    assert len(calls(launcher)) == 3 + 6, "seed, baseline, candidate, six control runs"


def test_pinned_routes_do_not_pass_what_differs_with_free_ones(launcher):
    wrong = "layout=tp=2 --model.name mixtral --moe.z_loss_weight 1"
    found = compare(plan(wrong, "--model.name mixtral", **PIN), launcher, silent)
    assert found.free is not None and found.free.verdict is Verdict.DIFFERENT
    assert found.verdict is Verdict.INSIDE and found.as_json()["exit_code"] == 1
    assert found.outcome is Verdict.DIFFERENT and "but different with free ones" in found.words


def test_pinned_routes_show_what_flips_hide(launcher):
    mixtral = "--model.name mixtral"
    asked = plan(f"layout=tp=2 {mixtral} --optimizer.lr 3.003e-3", mixtral, pin_routing=True)
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
    equal = compare(plan(baseline="revision=main", pin_routing=True), launcher, silent)
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
    common = replace(COMMON, config=config)
    same = Plan("t", parse_run_spec("revision=main", common), parse_run_spec("", common), 0)
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
        ('"loss": loss, "grad_norm": loss, ', "", "have no loss in common"),
    ],
)
def test_runs_without_a_finite_loss_do_not_pass(launcher, right: str, wrong: str, said: str):
    script = launcher.folder.parent / "code" / "run_train.sh"
    script.write_text(script.read_text().replace(right, wrong))
    with pytest.raises(ConfigError, match=said):
        compare(plan(baseline="revision=main"), launcher, silent)
    with pytest.raises(ConfigError, match=said):
        bisect(plan(baseline="revision=main"), launcher, [], silent)
    finished = [str(launcher.folder / name) for name in ("baseline", "candidate")]
    with pytest.raises(ConfigError, match=r"train it again, as config=.*/config\.toml"):
        bisect(plan(*finished, steps=6), launcher, [], silent)


def test_an_interrupted_comparison_goes_on(launcher):
    def interrupt(line: str) -> None:
        if "control/03" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(plan("layout=tp=2"), launcher, interrupt)
    assert len(calls(launcher)) == 5
    note = launcher.folder / "control" / "02" / "comparison_run.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"seconds": None}))
    assert compare(plan("layout=tp=2"), launcher, silent).verdict is Verdict.INSIDE
    assert [run["folder"] for run in calls(launcher)[5:7]] == ["02", "03"]
    assert len(calls(launcher)) == 12


def test_code_that_changes_meanwhile_is_told(launcher, monkeypatch):
    trees = iter(["a", "a", "a", "b"] + ["b"] * 50)

    def changing(side: str, *_: object) -> CodeTree:
        return CodeTree(launcher.folder.parent / "code", next(trees), "working tree")

    monkeypatch.setattr(launching_module, "code_tree", changing)
    plain = Launcher(launcher.folder)
    with pytest.raises(TrainingError, match="was changed meanwhile"):
        compare(plan("layout=tp=2"), plain, silent)


def test_a_folder_of_something_else_is_left_alone(launcher):
    precious = launcher.folder / "baseline" / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_text("weights")
    with pytest.raises(ConfigError, match="choose another --out"):
        compare(plan("layout=tp=2"), launcher, silent)
    assert precious.read_text() == "weights"


def test_a_run_that_fails_shows_its_last_lines(launcher):
    with pytest.raises(TrainingError) as caught:
        compare(plan("--debug.seed 13"), launcher, silent)
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
        ("--model.name qwen3", PIN, r"--pin-routing: layers is .* in the candidate: choose two"),
        ("layout=tp=2", PIN | {"steps": 10**9}, "the routes of 2 runs take .* GB, .* GB free"),
    ],
)
def test_mistakes_are_told_before_anything_runs(launcher, candidate: str, changes: dict, said: str):
    with pytest.raises(ConfigError, match=said):
        compare(plan(candidate, **changes), launcher, silent)
    assert not calls(launcher)


@pytest.mark.parametrize(
    "nodes", [{"SLURM_JOB_NUM_NODES": "2"}, {launching_module.EVERY_NODE: "env all", "NNODES": "2"}]
)
def test_more_ranks_than_gpus_are_told_before_anything_runs(launcher, nodes: dict, monkeypatch):
    monkeypatch.setattr(device_count, "count_gpus", lambda _: 4)
    for name, value in nodes.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NGPU", raising=False)
    default = plan_of("x", COMMON, "", "ranks=1", num_control_runs=0).baseline
    assert default.world_size == 8, "all of both nodes"
    with pytest.raises(ConfigError, match=r"ranks=16: 8 GPUs on 2 node\(s\): choose a smaller"):
        compare(plan("ranks=16", num_control_runs=0), launcher, silent)
    assert not calls(launcher)


def test_trainings_are_counted_and_timed_and_finished_ones_are_found(launcher):
    told: list[str] = []
    compare(plan("layout=tp=2"), launcher, told.append)
    assert told[0] == "at most 10 trainings, 8 of them control runs"
    first, *_, last = [line for line in told if line.startswith("training ")]
    assert first.startswith("training 1 of at most 10, baseline: ")
    assert re.match(r"training 10 of at most 10 \(\d+ s to go at most\), control/08: ", last)
    told.clear()
    compare(plan("--optimizer.lr 3.06e-3"), launcher, told.append)
    assert re.match(r"at most 1 trainings, 0 .*; 9 more are found; at most \d+ s at the", told[0])
    (only,) = [line for line in told if line.startswith("training ")]
    assert only.startswith("training 1 of at most 1 (")


def test_without_a_seed_checkpoint_initial_weights_must_agree(launcher):
    same = plan("layout=tp=2", seed=False)
    assert compare(same, launcher, silent).verdict is Verdict.INSIDE
    assert all(run["metrics.log_initial_weights"] == "true" for run in calls(launcher))
    assert "checkpoint.initial_load_path" not in calls(launcher)[0] and len(calls(launcher)) == 10
    with pytest.raises(ConfigError, match="initial weights: b has checksum 0 in baseline, 7 in"):
        compare(plan("--debug.seed 7", seed=False), launcher, silent)


def test_finished_runs_need_no_seed_and_are_compared_bit_by_bit(launcher, tmp_path: Path):
    compare(plan("layout=tp=2", num_control_runs=0), launcher, silent)
    before = len(calls(launcher))
    finished = plan(str(launcher.folder / "candidate"), str(launcher.folder / "baseline"))
    told: list[str] = []
    found = compare(finished, launcher, told.append)
    assert found.verdict is Verdict.UNJUDGED and "only bits are compared" in told[0]
    with pytest.raises(ConfigError, match="--pin-routing trains both runs: name no finished run"):
        compare(replace(finished, pin_routing=True), launcher, silent)
    assert len(calls(launcher)) == before


LIMITS = {"steps": 12, "max_slowdown": 0.1, "max_memory_growth": 0.1}
SLOW = "--activation_checkpoint.mode full"


def num_counted(plan: Plan, launcher: Launcher) -> int:
    """Returns the trainings that are counted beforehand, control runs apart."""
    Runner(plan, launcher, silent).prepare(forecast := Forecast())
    (row,) = forecast.rows()
    return row["trainings"] - row["control runs"]


def test_time_is_judged_by_runs_in_turn_that_are_all_trained_now(launcher):
    within = compare(plan(baseline="revision=main", **LIMITS), launcher, silent)
    assert within.outcome is Verdict.IDENTICAL and not any(c.verdict for c in within.costs)
    before, again = len(calls(launcher)), plan(SLOW, **LIMITS)
    shared = Stubbed(launcher.folder, shared=launcher.folder / "runs")
    for launching in (launcher, launcher, shared):
        found = compare(again, launching, silent)
        assert found.verdict is Verdict.IDENTICAL and found.outcome is Verdict.TOO_SLOW
        assert [cost.growth for cost in found.costs] == pytest.approx([0.3, 0.3])
        assert found.lines()[0] == "test: identical bits, but too slow"
        assert sum(": too large;" in line for line in found.lines()) == 1
        assert found.as_json()["exit_code"] == 6 and found.as_json()["curves"] == "identical"
    runs = [run["folder"] for run in calls(launcher)[before:]]
    assert [name for name in runs if name in ("baseline", "candidate")] == runs[-6:] * 3
    assert runs[-6:] == ["baseline", "candidate"] * 3 and num_counted(again, launcher) == 6


def test_memory_alone_takes_one_pair_and_other_curves_stay_different(launcher):
    limits = {**LIMITS, "max_slowdown": None}
    found = compare(plan(SLOW, **limits), launcher, silent)
    assert found.outcome is Verdict.TOO_LARGE and len(calls(launcher)) == 3
    found = compare(plan(f"{SLOW} --optimizer.lr 6e-3", **limits), launcher, silent)
    assert found.outcome is Verdict.DIFFERENT and "too large" in " ".join(found.lines()[1:])


def test_a_gpu_s_golden_holds_costs_for_candidates_on_the_same_gpu(launcher, monkeypatch):
    facts = {"device": "NVIDIA H100", "capability": describe_device(CPU)["capability"]}
    script = launcher.folder.parent / "code" / "run_train.sh"
    named = '"device": "NVIDIA H100", "layout": {}'
    script.write_text(script.read_text().replace('"device": "cpu"', named))
    monkeypatch.setattr(goldens, "describe_device", lambda _: facts)
    path = update_golden(plan(steps=12), launcher, launcher.folder / "g", "a first one", silent)
    no_config = RunSpec(overrides=(("training.steps", "12"),))
    runs = parse_run_spec(str(path), no_config), parse_run_spec(SLOW, no_config)
    against, before = Plan("g", *runs, 8, max_slowdown=0.1), len(calls(launcher))
    found = compare(against, launcher, silent)
    assert found.outcome is Verdict.TOO_SLOW and num_counted(against, launcher) == 3
    assert len(calls(launcher)) == before + 3
    monkeypatch.setattr(goldens, "describe_device", lambda _: {**facts, "device": "NVIDIA H200"})
    with pytest.raises(ConfigError, match=r"this machine is torch-.*H200"):
        compare(against, launcher, silent)


def test_suite_s_comparisons_share_runs(launcher):
    (launcher.folder / "code").parent.mkdir()
    (launcher.folder / "code").symlink_to(launcher.folder.parent / "code")
    for name in ("a", "b"):
        one = Stubbed(launcher.folder / name, shared=launcher.folder / "runs")
        compare(plan("layout=tp=2"), one, silent)
    assert len(calls(launcher)) == 11 and len(list((launcher.folder / "runs").iterdir())) == 11


def test_a_golden_has_its_own_configuration_and_controls(launcher, tmp_path: Path):
    golden = tmp_path / "goldens" / "tiny"
    path = update_golden(plan(), launcher, golden, "a first one", silent)
    assert path.parent == golden and len(calls(launcher)) == 10
    no_config = RunSpec(overrides=(("training.steps", "6"),))
    sides = parse_run_spec(str(golden), no_config), parse_run_spec("", no_config)
    against = Plan("g", *sides, num_control_runs=8)
    assert compare(against, launcher, silent).verdict is Verdict.IDENTICAL
    assert calls(launcher)[-1]["folder"] == "candidate" and len(calls(launcher)) == 11
    wrong = replace(against, candidate=parse_run_spec("--optimizer.lr 3.1e-3", no_config))
    with pytest.raises(ConfigError, match="holds no cost"):
        compare(replace(wrong, max_slowdown=0.1), launcher, silent)
    assert compare(wrong, launcher, silent).verdict is Verdict.DIFFERENT
    with pytest.raises(ConfigError, match="has its own configuration"):
        compare(replace(against, candidate=COMMON), launcher, silent)
    with pytest.raises(ConfigError, match="a golden is a baseline"):
        compare(Plan("g", no_config, parse_run_spec(str(golden), no_config), 8), launcher, silent)


def test_a_golden_wants_a_reason_before_anything_runs(launcher, tmp_path: Path):
    with pytest.raises(ConfigError, match="needs --reason"):
        update_golden(plan(), launcher, tmp_path / "g", " ", silent)
    assert not calls(launcher)
