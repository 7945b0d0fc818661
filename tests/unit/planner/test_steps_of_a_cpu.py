"""Recorded steps of gloo ranks on a CPU, beside those that the planner expects of its figures."""

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from scripts.bench import plan_on_cpu
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import model_of_job
from titan_moe.parallelize.policies import make_plan
from titan_moe.planner import links, step_time
from titan_moe.planner.load import BALANCED
from titan_moe.runtime.gpus import GPUS, Device

_CPU = replace(GPUS["H100"], cores=8, node=64)


def _fails() -> list[str]:
    """Returns what is wrong with the expected steps."""
    rows = plan_on_cpu.rows()
    order, error = plan_on_cpu.rank_correlation(rows), median(abs(row.error) for row in rows)
    bias = median(row.error for row in rows)
    return [
        name
        for name, right in (
            ("order", order > 0.94),
            ("error", error < 0.2),
            ("bias", abs(bias) < 0.15),
        )
        if not right
    ]


def test_recorded_steps_are_expected_in_their_order_and_within_a_fifth() -> None:
    assert len(plan_on_cpu.CASES) >= 40
    assert _fails() == []


def _planted() -> dict[str, tuple[Any, str, Callable[[Any], Any]]]:
    def halved(right: Any) -> Any:
        return lambda *args: right(*args) / 2

    return {
        "bytes of collectives": (links.Links, "collective", halved),
        "bytes of exchanges": (links.Links, "exchange", halved),
        "experts": (step_time, "_experts", halved),
    }


def seconds(ranks: int, device: Device, **keys: int) -> dict[str, float]:
    case = plan_on_cpu.Case("qwen3/debugmodel_moe", f"dp_shard={ranks}")
    job = case.job().with_values(parallelism=keys)
    config: ModelConfig = model_of_job(job.model)
    return step_time.step_time(make_plan(job, config, ranks), device, BALANCED)


def test_ranks_share_the_cores_of_a_cpu() -> None:
    alone, shared = (seconds(4, replace(_CPU, cores=cores)) for cores in (4, 1))
    assert shared == pytest.approx({region: 4 * value for region, value in alone.items()})
    assert seconds(4, _CPU) == alone, "a rank has one thread"
