"""The gradient gate on a sample of layouts, and that it can fail.

Every rank's gradients, parameters, moments, biases and counts against the one-process reference;
titan-moe verify gradients runs the same on every layout.
"""

import json
import subprocess
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.commands import run_command
from tests.support.gates import OTHERS, SAMPLE, SMALL, Gates, cover
from tests.support.paths import DEBUG_CONFIGS
from tests.support.tiers import split, tiered
from titan_moe.config.parse import load_job
from titan_moe.models.registry import FAMILIES
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.verify.gradients import worker
from titan_moe.verify.gradients.compare import TOLERANCES
from titan_moe.verify.gradients.gate import Gate
from titan_moe.verify.gradients.worker import RankReport, Task, verify_on_rank
from titan_moe.verify.layouts.covering import pairs
from titan_moe.verify.layouts.layouts import (
    AXES,
    OPTIONS,
    Layout,
    depth,
    num_rows,
    parse,
    with_tables,
)


@pytest.fixture(scope="module")
def deepseek(gates: Gates) -> Gate:
    return gates("deepseek_v3")


FEW = cover([4], 6, seed=3)
UNEVEN = ["dp_shard=3", "dp_shard=3,dp_replicate=2,recompute=2", "dp_shard=3,tp=2,ep=2"]


def test_the_sample_covers_each_pair_of_axes_and_each_schedule():
    layouts, small = ([parse(text) for text in texts] for texts in (SAMPLE, SMALL))
    for texts in (layouts, small):
        assert set().union(*(pairs(layout) for layout in texts)) == set(combinations(AXES, 2))
    assert len(small) <= 10 and max(layout.world_size for layout in small) <= 4
    for option, values in OPTIONS.items():
        assert {getattr(each, option) for each in layouts if each.has(option)} == set(values)


@pytest.mark.parametrize("text", split([*SMALL, *SAMPLE], SMALL, SAMPLE[1::3]))
def test_a_sampled_layout_trains_the_same_model(deepseek: Gate, text: str):
    result = deepseek.verify(parse(text))
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.parametrize("text", split(UNEVEN, UNEVEN[:1]))
def test_uneven_shards_train_the_same_model(deepseek: Gate, text: str):
    result = deepseek.verify(parse(text))
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.parametrize("text", split(FEW, FEW[:2], FEW[2:3]))
@pytest.mark.parametrize("family", OTHERS)
def test_another_family_trains_the_same_model(gates: Gates, family: str, text: str):
    result = gates(family).verify(parse(text))
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.parametrize(
    "text",
    tiered(
        ["pp=2,tp=2"],
        slow=["pp=2,cp=2,schedule=ZBVZeroBubble,cp_balancer=headtail,recompute=none"],
    ),
)
def test_two_depths_and_a_tied_output_train_the_same_model(tmp_path: Path, text: str):
    """Four copies of one embedding, on one rank or on both ends of a pipeline."""
    path = str(DEBUG_CONFIGS / "gate_qwen3.toml")
    job = load_job(["--job.config_file", path, "--model.num_mtp_layers", "2"])
    gate = Gate(job, tmp_path)
    assert gate.config.num_mtp_layers == 2 and gate.config.tied_embeddings
    result = gate.verify(parse(text))
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.full
@pytest.mark.parametrize("text", SAMPLE)
@pytest.mark.parametrize("family", OTHERS)
def test_every_family_trains_the_same_model_in_the_sample(gates: Gates, family: str, text: str):
    result = gates(family).verify(parse(text))
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.parametrize(
    "family, text",
    tiered(
        [("deepseek_v3", "dp_shard=2,cp=2,ep=2,etp=2")],
        slow=[*product(FAMILIES, ["pp=2,tp=2,ep=2"])],
        full=[*product(FAMILIES, ["dp_shard=1"]), *product(OTHERS, ["dp_shard=2,cp=2,ep=2,etp=2"])],
    ),
)
def test_float32_through_grouped_gemms(gates: Gates, family: str, text: str):
    result = gates(family).verify(parse(text), dtype="float32")
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.full
@pytest.mark.parametrize("text", SAMPLE)
def test_the_sample_in_float32(deepseek: Gate, text: str):
    result = deepseek.verify(parse(text), dtype="float32")
    assert result.passed, "\n".join([*result.lines, result.traceback])


def with_joint_gate_up(task: Task) -> RankReport:
    moe = task.config.moe
    assert moe is not None
    joint = replace(moe, joint_gate_up=True)
    return verify_on_rank(task._replace(config=replace(task.config, moe=joint)))


@pytest.mark.parametrize(
    "family, text",
    tiered(
        [("deepseek_v3", "tp=2,etp=2")],
        slow=[*product(FAMILIES, ["dp_shard=2,tp=2,ep=2,etp=2,recompute=full"])],
        full=[*product(FAMILIES, SMALL)],
    ),
)
def test_one_product_of_gate_and_up_trains_the_same_model(gates: Gates, family: str, text: str):
    """As on a GPU where it pays."""
    layout, task = task_of(gates(family), text)
    for report in run_on_ranks(with_joint_gate_up, layout.world_size, task):
        assert report.num_wrong == 0 and not report.problems, [*report.wrong, *report.problems]


HALVES = {
    "default": [("deepseek_v3", "dp_shard=2,ep=2,recompute=full")],
    "slow": [
        ("deepseek_v3", "dp_shard=2,tp=2,ep=4,dispatch=nodes,recompute=op"),
        ("deepseek_v3", "dp_shard=2,cp=2,ep=2,etp=2,dispatch=deduplicated,reshard=always"),
        ("deepseek_v3", "dp_shard=2,tp=2,ep=4,dispatch=bounded,recompute=full"),
        ("deepseek_v3", "pp=2,dp_shard=2,ep=2,schedule=ZBVZeroBubble"),
        ("gpt_oss", "dp_shard=2,tp=2,ep=2,etp=2,recompute=2"),
        ("llama4", "dp_shard=2,cp=2,ep=4"),
    ],
}


@pytest.mark.parametrize("family, text", tiered(HALVES["default"], slow=HALVES["slow"]))
def test_two_halves_of_a_microbatch_train_the_same_model(gates: Gates, family: str, text: str):
    layout, task = task_of(gates(family), text)
    job = with_tables(task.job, {"parallelism": {"expert_parallel_overlap": True}})
    for report in run_on_ranks(verify_on_rank, layout.world_size, task._replace(job=job)):
        assert report.num_wrong == 0 and not report.problems, [*report.wrong, *report.problems]


def test_an_illegal_layout_gets_one_line(deepseek: Gate):
    result = deepseek.verify(parse("dp_shard=16,ep=16"))
    assert result.status == "refused" and len(result.lines) == 1
    assert "expert_parallel_degree=16 must divide num_experts=8" in result.lines[0]


# --- every comparison can fail --------------------------------------------------------------------


def spoilt_rank(task: Task, quantity: str, bad_rank: int) -> RankReport:
    """The gate with one number of one rank's snapshot changed by a millionth."""
    snapshot = worker._snapshot

    def spoilt(*args):
        taken = snapshot(*args)
        if dist.get_rank() == bad_rank:
            tensors = getattr(taken, quantity)
            tensors[sorted(tensors)[-1]].mul_(1 + 1e-6)
        return taken

    worker._snapshot = spoilt
    return verify_on_rank(task)


def task_of(gate: Gate, text: str) -> tuple[Layout, Task]:
    layout = parse(text)
    job, config = gate._setting(layout, "float64")
    path, _ = gate._fixture(layout)
    return layout, Task(job, config, layout, path, TOLERANCES["float64"])


@pytest.mark.parametrize(
    "quantity, named",
    [
        ("gradients", "gradient"),
        *tiered(
            [],
            slow=[
                ("parameters", "parameter"),
                ("exp_avg", "exp_avg"),
                ("exp_avg_sq", "exp_avg_sq"),
                ("expert_bias", "expert_bias"),
                ("previous_load", "previous_load"),
            ],
        ),
    ],
)
def test_a_replica_that_diverged_is_named(deepseek: Gate, quantity: str, named: str):
    _, task = task_of(deepseek, "dp_replicate=2")
    good, bad = run_on_ranks(spoilt_rank, 2, task, quantity, 1)
    assert good.num_wrong == 0 and bad.num_wrong > 0
    assert {difference.quantity for difference in bad.wrong} == {named}
    assert all(difference.rank == 1 for difference in bad.wrong)


def reads_a_tail(task: Task) -> RankReport:
    """The gate with a dispatcher that adds nothing times the tail to what it brings home."""
    from titan_moe.moe.dispatch.base import LocalDispatcher

    combine = LocalDispatcher.combine
    LocalDispatcher.combine = lambda self, y_RD, plan: combine(self, y_RD, plan) + 0 * y_RD[-1]
    return verify_on_rank(task)


def test_who_reads_a_tail_is_seen(deepseek: Gate):
    _, task = task_of(deepseek, "dp_shard=1")
    (verdict,) = run_on_ranks(reads_a_tail, 1, task)
    assert verdict.num_wrong > 0


def holds_another_shard(task: Task) -> RankReport:
    """The gate told that the ranks stand the other way round."""
    from titan_moe.verify.layouts.shards import Shards

    coordinate = Shards.coordinate
    Shards.coordinate = lambda self, rank, axis: coordinate(self, 1 - rank, axis)
    return verify_on_rank(task)


def test_shards_in_another_order_are_seen(deepseek: Gate):
    _, task = task_of(deepseek, "dp_shard=2")
    for verdict in run_on_ranks(holds_another_shard, 2, task):
        assert any("begins with other values" in problem for problem in verdict.problems)


@pytest.mark.slow
def test_one_reference_for_each_depth(deepseek: Gate):
    layouts = [parse(text) for text in SAMPLE]
    for layout in layouts:
        deepseek._fixture(layout)
    keys = {(depth(layout), num_rows(layout)) for layout in layouts}
    assert keys <= deepseek._fixtures.keys() and len(keys) < 6


# --- the command line -----------------------------------------------------------------------------


def compare_layouts(*words: object) -> subprocess.CompletedProcess[str]:
    config = DEBUG_CONFIGS / "gate_deepseek_v3.toml"
    return run_command("verify", "gradients", "--config", config, *words)


def test_the_command_line_keeps_results_and_goes_on(tmp_path: Path):
    layouts = ["--layouts", "dp_shard=1", "dp_shard=2,ep=2", "--out", tmp_path]
    done = compare_layouts(*layouts)
    assert done.returncode == 0 and "2 of 2 pass" in done.stdout
    written = (tmp_path / "results.jsonl").read_text()
    assert compare_layouts(*layouts).returncode == 0
    assert (tmp_path / "results.jsonl").read_text() == written, "nothing was run again"
    assert json.loads((tmp_path / "results.json").read_text())["summary"]["passed"] == 2
    assert "2 of 2 layouts pass." in (tmp_path / "results.html").read_text()


def test_a_layout_that_the_model_cannot_have_is_a_usage_error(tmp_path: Path):
    done = compare_layouts("--layouts", "ep=16,dp_shard=16", "--out", tmp_path)
    assert done.returncode == 2 and "pass" not in done.stdout
    assert done.stderr.count("must divide num_experts=8") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("layout", ["tp", "tp=x", "warp=9", "ep=3"])
def test_a_mistyped_layout_is_a_usage_error(tmp_path: Path, layout: str):
    done = compare_layouts("--layouts", layout, "--out", tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
