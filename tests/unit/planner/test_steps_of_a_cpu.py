"""Recorded steps of gloo ranks on a CPU, beside those that the planner expects of its figures."""

from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from scripts.bench import plan_on_cpu
from tests.support.paths import REPO
from titan_moe.parallelize.policies import make_plan
from titan_moe.planner import links, step_time
from titan_moe.planner.load import BALANCED
from titan_moe.planner.step_time import Seconds
from titan_moe.runtime.gpus import GPUS, Device

_ORDER, _ERROR = 0.9, 0.2
"""Bounds of the rank correlation, and of the median error of seconds."""
_PAGE = (REPO / "docs/benchmarks.md").read_text(encoding="utf-8")


def problems() -> list[str]:
    """Returns what is wrong with the expected steps."""
    rows = plan_on_cpu.rows()
    found = {
        "order": plan_on_cpu.rank_correlation(rows) < _ORDER,
        "error": median(abs(row.error) for row in rows) > _ERROR,
        "not those of docs/benchmarks.md": plan_on_cpu.table() not in _PAGE,
    }
    return [problem for problem, occurs in found.items() if occurs]


def test_recorded_steps_are_expected_in_their_order_and_within_a_fifth() -> None:
    assert len(plan_on_cpu.CASES) >= 40
    assert problems() == []


def _halved(right: Any) -> Any:
    return lambda *args: right(*args) / 2


def _one_too_few(right: Any) -> Any:
    def seconds(*args: Any) -> Seconds:
        count = args[-1]
        return {region: s * max(count - 1, 1) / count for region, s in right(*args).items()}

    return seconds


@pytest.mark.parametrize(
    ("owner", "name", "plant"),
    [
        (links.Links, "exchange", _halved),
        (links.Links, "collective", _halved),
        (step_time, "_roofline", _halved),
        (step_time, "_optimizer", _halved),
        (step_time, "_rank_time", _one_too_few),
        (step_time, "bubble", lambda right: lambda plan: 0.0),
        (step_time, "_GATHER_PASSES", lambda right: 0),
    ],
)
def test_recorded_steps_show_a_planted_mistake(
    owner: Any, name: str, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, plant(getattr(owner, name)))
    assert problems()


def seconds_of(ranks: int, device: Device) -> Seconds:
    case = plan_on_cpu.Case("qwen3/debugmodel_moe", f"dp_shard={ranks}")
    return step_time.step_time(make_plan(case.job(), case.config(), ranks), device, BALANCED)


def test_ranks_share_the_cores_of_a_cpu() -> None:
    cpu = replace(GPUS["H100"], node=64)
    spare, alone, shared = (seconds_of(4, replace(cpu, cores=cores)) for cores in (8, 4, 1))
    assert spare == alone, "each rank has one thread"
    assert shared == pytest.approx({region: 4 * s for region, s in alone.items()})
