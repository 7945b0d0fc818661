"""The gradient gate on samples of layouts, families and optimizers, and proof that it can fail.

Every rank's gradients, parameters, moments, biases and counts against the one-process reference;
titan-moe verify gradients runs the same on every layout.
"""

import json
from itertools import combinations, product
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.catching import setting
from tests.support.commands import run_command
from tests.support.gates import OTHERS, SAMPLE, SMALL, Gates, cover, drawn, fitting
from tests.support.paths import DEBUG_CONFIGS
from tests.support.tiers import split, tiered
from titan_moe.config.pipeline import SCHEDULES
from titan_moe.models.registry import FAMILIES
from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.verify.gradients import worker
from titan_moe.verify.gradients.compare import above_bound
from titan_moe.verify.gradients.worker import RankReport, Task, verify_on_rank
from titan_moe.verify.layouts.covering import pairs
from titan_moe.verify.layouts.layouts import AXES, OPTIONS, SPLIT_BACKWARD, parse

FEW = cover([4], 6, seed=3)
UNEVEN = ["dp_shard=3", "dp_shard=3,dp_replicate=2,recompute=2", "dp_shard=3,tp=2,ep=2"]
MUON = cover([2, 4], 8, seed=6)
SCHEDULED = [f"pp=2,schedule={name}" for name in SCHEDULES]
SPLIT = [text for text in SCHEDULED if parse(text).schedule in SPLIT_BACKWARD]
TWO_DEPTHS = "pp=2,cp=2,schedule=ZBVZeroBubble,cp_balancer=headtail,recompute=none"
HOST = "through the host"
RECURRENT = ["kimi_linear", "nemotron_h", "qwen3_next"]
# Families whose kinds of layers have heads and positions of their own.
BY_KIND = ["gemma4", "mimo_v2", "step3p7"]
# A norm follows the gates that make one stream of DeepSeek-V4's, and cancels most of their
# gradients: float32 has too few digits of what is left.
IN_FLOAT32 = [family for family in FAMILIES if family != "deepseek_v4"]
WHOLE_BACKWARD = [s for s in SAMPLE if parse(s).schedule not in SPLIT_BACKWARD]
# Family, kind of gate, layout.
DEFAULT = [
    *product(["deepseek_v3"], ["AdamW"], [*SMALL, UNEVEN[0]]),
    *product(OTHERS, ["AdamW"], ["tp=2,ep=2,recompute=full"]),
    ("deepseek_v3", "Muon", "dp_shard=2,tp=2,etp=2"),
    ("deepseek_v3", "overlap", "dp_shard=2,ep=2,recompute=full"),
    ("qwen3", "two depths", "pp=2,tp=2"),
    ("deepseek_v32", "shared keys", "cp=2,ep=2,recompute=full"),
    ("deepseek_v32", "conversations", "dp_shard=2,tp=2,ep=2"),
    ("deepseek_v3", "adapters", "dp_shard=2,tp=2,ep=2,etp=2,recompute=full"),
    ("qwen3", "frozen", "dp_shard=2,ep=2"),
    ("qwen3", "group of a tied weight", "pp=2"),
    *product(["deepseek_v3"], [HOST], ["dp_shard=2,ep=2,dispatch=deduplicated", "pp=2,tp=2"]),
]
SLOW = [
    *product(["deepseek_v3"], ["AdamW"], [*SAMPLE[1::6], *UNEVEN[1:]]),
    *product(["deepseek_v3"], ["AdamW"], [drawn(seed) for seed in (1, 3, 7)]),
    *product(OTHERS, ["AdamW"], FEW[:1]),
    *product(["deepseek_v3"], ["Muon"], [*MUON[::3], *UNEVEN[::2]]),
    ("deepseek_v3", "narrow", "dp_shard=2,tp=2,ep=2"),
    ("deepseek_v3", "overlap", "dp_shard=2,tp=2,ep=4,dispatch=nodes,recompute=op"),
    ("deepseek_v3", "overlap", "dp_shard=2,cp=2,ep=2,etp=2,dispatch=deduplicated,reshard=always"),
    ("deepseek_v3", "overlap", "dp_shard=2,tp=2,ep=4,dispatch=bounded,recompute=full"),
    ("deepseek_v3", "overlap", "pp=2,dp_shard=2,ep=2,schedule=ZBVZeroBubble"),
    ("gpt_oss", "overlap", "dp_shard=2,tp=2,ep=2,etp=2,recompute=2"),
    ("llama4", "overlap", "dp_shard=2,cp=2,ep=4"),
    *product(["deepseek_v3"], ["AdamW", "adapters"], SPLIT),
    ("gpt_oss", "overlap", "pp=2,dp_shard=2,ep=2,schedule=DualPipeV"),
    ("qwen3", "two depths", TWO_DEPTHS),
    ("deepseek_v32", "warm-up", "dp_shard=2,cp=2,ep=2,recompute=op"),
    ("deepseek_v32", "warm-up", "pp=2,dp_shard=2,schedule=Interleaved1F1B"),
    *product(["deepseek_v3", "deepseek_v32"], ["compiled"], ["dp_shard=2,ep=2,recompute=2"]),
    ("deepseek_v32", "shared keys", "dp_shard=2,tp=2,ep=2,recompute=op"),
    ("deepseek_v32", "shared keys", "dp_shard=2,cp=2,ep=2,cp_balancer=headtail"),
    *product(["deepseek_v32"], ["warm-up", "warm-up of shared keys"], ["tp=2,recompute=full"]),
    *product(["deepseek_v3"], ["conversations", "adapters"], SMALL[1::2]),
    *product(["gpt_oss", "llama4", *RECURRENT], ["adapters"], ["dp_shard=2,tp=2,ep=2,etp=2"]),
    ("deepseek_v32", "adapters", FEW[0]),
    ("deepseek_v3", "compiled adapters", "tp=2,etp=2,recompute=2"),
    *product(["deepseek_v3"], ["frozen"], [FEW[0], "pp=2,schedule=ZBVZeroBubble"]),
    *product(RECURRENT, ["Muon"], ["dp_shard=2,tp=2,ep=2"]),
    *product(RECURRENT, ["compiled"], ["cp=2,ep=2,recompute=2"]),
    # A split backward runs a layer's nodes twice.
    ("deepseek_v32", "AdamW", "pp=2,schedule=ZBVZeroBubble"),
    ("deepseek_v3", "compiled", "dp_shard=2,ep=2,recompute=op,dispatch=bounded"),
    ("gpt_oss", "compiled", "tp=2,etp=2"),
    *product(["deepseek_v3"], [HOST], ["cp=2,cp_method=ring", "dp_replicate=2,dp_shard=2,ep=2"]),
    *product(["deepseek_v3"], [HOST], ["pp=2,schedule=ZBVZeroBubble", "cp=2,cp_method=ulysses"]),
    *product(RECURRENT, [HOST], ["dp_shard=2,tp=2,ep=2", "cp=2,ep=2"]),
    ("deepseek_v3", "compiled halves", "dp_shard=2,ep=2,dispatch=bounded"),
]
FULL = [
    *product(["deepseek_v3"], ["AdamW", "adapters"], SCHEDULED),
    *product(["deepseek_v3"], ["conversations", "adapters"], SMALL),
    *product(["deepseek_v3"], ["Muon"], MUON),
    *product(["deepseek_v3"], ["frozen"], FEW[1:3]),
    *product(FAMILIES, ["AdamW"], [*FEW, SMALL[2], *SAMPLE]),
    ("deepseek_v32", "adapters", FEW[1]),
    *product(BY_KIND, ["adapters", "compiled", "Muon"], ["tp=2,ep=2,recompute=2"]),
    ("deepseek_v3", "compiled adapters", "dp_shard=2,tp=2,etp=2,recompute=2"),
    ("gpt_oss", "compiled", "dp_shard=2,tp=2,ep=2,etp=2"),
    ("deepseek_v3", "compiled halves", "dp_shard=2,ep=2"),
    *product(["deepseek_v3"], ["compiled"], ["tp=2", "cp=2,cp_method=ring"]),
    # compile refuses a schedule that splits the backward.
    *product(["deepseek_v3"], ["compiled"], WHOLE_BACKWARD),
    ("deepseek_v3", "inductor", "dp_shard=2,ep=2,recompute=op"),
    ("deepseek_v3", "inductor", "dp_shard=2,ep=2,dispatch=bounded"),
]


@pytest.mark.parametrize("family, kind, text", split([*DEFAULT, *SLOW, *FULL], DEFAULT, SLOW))
def test_layout_trains_the_same_model(gates: Gates, family: str, kind: str, text: str):
    result = gates(family, kind).verify(parse(fitting(family, text)))
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.parametrize(
    "family, text",
    tiered(
        [("deepseek_v3", "tp=2,ep=2")],
        slow=[
            *product(IN_FLOAT32, ["pp=2,tp=2,ep=2"]),
            ("deepseek_v3", "dp_shard=2,cp=2,ep=2,etp=2"),
        ],
        full=[
            *product(IN_FLOAT32, ["dp_shard=1"]),
            *product(IN_FLOAT32[1:], ["dp_shard=2,cp=2,ep=2,etp=2"]),
            *product(["deepseek_v3"], SAMPLE),
        ],
    ),
)
def test_layout_trains_the_same_model_in_float32(gates: Gates, family: str, text: str):
    result = gates(family).verify(parse(fitting(family, text)), dtype="float32")
    assert result.passed, "\n".join([*result.lines, result.traceback])


@pytest.mark.full
def test_drawn_layouts_pass_or_are_refused(gates: Gates):
    results = [gates("deepseek_v3").verify(parse(drawn(seed))) for seed in range(100, 160)]
    assert [result.lines for result in results if result.status == "failed"] == []
    assert sum(result.passed for result in results) >= 20


def test_samples_cover_each_pair_of_axes_and_each_option():
    layouts, small = ([parse(text) for text in texts] for texts in (SAMPLE, SMALL))
    for texts in (layouts, small):
        assert set().union(*(pairs(layout) for layout in texts)) == set(combinations(AXES, 2))
    assert max(layout.world_size for layout in small) <= 4
    for option, values in OPTIONS.items():
        assert {getattr(each, option) for each in layouts if each.has(option)} == set(values)


# --- every comparison can fail --------------------------------------------------------------------


def spoilt_rank(task: Task, quantity: str) -> RankReport:
    """The gate with one number of rank 1's snapshot changed by a millionth."""
    snapshot = worker._snapshot

    def spoilt(*args):
        taken = snapshot(*args)
        if dist.get_rank() == 1:
            tensors = taken[quantity]
            tensors[sorted(tensors)[-1]].mul_(1 + 1e-6)
        return taken

    worker._snapshot = spoilt
    return verify_on_rank(task)


@pytest.mark.parametrize(
    "quantity",
    tiered(
        ["gradient"], slow=["parameter", "exp_avg", "exp_avg_sq", "expert_bias", "previous_load"]
    ),
)
def test_gate_names_diverged_replica(gates: Gates, quantity: str):
    task = setting(gates("deepseek_v3"), "dp_replicate=2", "dp_replicate=2")
    reports = run_on_ranks(spoilt_rank, 2, task, quantity)
    good, bad = (above_bound(report.differences, "float64") for report in reports)
    assert not good
    assert {(d.quantity, d.rank) for d in bad} == {(quantity, 1)}


def holds_another_shard(task: Task) -> RankReport:
    """The gate told that the ranks stand the other way round."""
    from titan_moe.verify.layouts.shards import Shards

    coordinate = Shards.coordinate
    Shards.coordinate = lambda self, rank, axis: coordinate(self, 1 - rank, axis)
    return verify_on_rank(task)


def test_gate_sees_shards_in_another_order(gates: Gates):
    task = setting(gates("deepseek_v3"), "dp_shard=2", "dp_shard=2")
    for report in run_on_ranks(holds_another_shard, 2, task):
        assert any("begins with other values" in problem for problem in report.problems)


# --- the command line -----------------------------------------------------------------------------


def test_command_keeps_results_and_goes_on(tmp_path: Path):
    config = DEBUG_CONFIGS / "gate_deepseek_v3.toml"
    words = ["verify", "gradients", "--config", config, "--out", tmp_path]
    words += ["--layouts", "dp_shard=1", "dp_shard=2,ep=2"]
    done = run_command(*words)
    assert done.returncode == 0 and "2 of 2 pass" in done.stdout
    written = (tmp_path / "results.jsonl").read_text()
    assert run_command(*words).returncode == 0
    assert (tmp_path / "results.jsonl").read_text() == written, "nothing was run again"
    assert json.loads((tmp_path / "results.json").read_text())["summary"]["passed"] == 2
    assert "2 of 2 layouts pass." in (tmp_path / "results.html").read_text()
