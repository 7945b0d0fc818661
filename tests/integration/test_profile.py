"""A profile of a run names every region of a step, forward and backward, on every rank."""

import json
from pathlib import Path

import pytest

from tests.support.commands import run_command
from tests.support.jobs import run_train
from tests.support.tiers import tiered
from titan_moe.profiling.trace import EXPOSED, IDLE
from titan_moe.runtime.regions import REGIONS


@pytest.mark.parametrize("ranks", tiered([], slow=[2], full=[1]))
def test_profile_names_every_region_of_a_step(tmp_path: Path, ranks: int) -> None:
    run = run_train(
        tmp_path,
        {"NGPU": ranks},
        parallelism__expert_parallel_degree=ranks,
        training__steps=3,
        profiling__enable_profiling="true",
        profiling__profile_freq=3,
        profiling__profiler_warmup=1,
        activation_checkpoint__mode="full",
    )
    assert run.returncode == 0, run.stderr
    step = tmp_path / "profile_traces" / "step-3"
    shown = run_command("report", "profile", step)
    assert shown.returncode == 0, shown.stderr
    facts = json.loads((step / "summary.json").read_text())
    assert facts["ranks"] == list(range(ranks)) and facts["steps"] == 1
    regions = facts["regions"]
    assert set(REGIONS) <= set(regions)
    for region in ("attention", "dispatch", "experts", "combine", "shared_experts"):
        row = regions[region]
        assert min(row["forward"], row["backward"]) > 0, region
        # A recomputation ends before the rows' way back.
        assert (row["recompute"] > 0) == (region != "combine"), region
    assert regions["loss"]["backward"] > 0
    # The parts are the whole, and what other ranks are waited for is a part of it.
    parts = [row["share"] for row in regions.values()] + [facts[EXPOSED]["share"]]
    assert sum(parts) + facts[IDLE]["share"] == pytest.approx(1, abs=0.02)
    if ranks > 1:
        assert "gloo:all_to_all" in facts["collectives"]
        assert 0 < facts[EXPOSED]["mean"] <= facts["communication"]["mean"]
