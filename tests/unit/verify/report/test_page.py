"""The page of a comparison, parsed as a browser would."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.report_cases import Page, facts
from tests.support.verdict_cases import run
from titan_moe.verify.compare.cost import MEMORY, TIME, CostCheck
from titan_moe.verify.compare.pinned_routes import Flips
from titan_moe.verify.compare.records import RunRecord, Verdict
from titan_moe.verify.compare.verdict import Comparison, compare_runs
from titan_moe.verify.report.pages import comparison_page
from titan_moe.verify.report.plots import Load, charts, load_panels

SECTIONS = ["curves", "load", "quantities", "configuration", "environment", "band"]
CONTROLS = [run(f"repeat {i}", 1e-6, seed=i) for i in range(1, 9)]
EIGHT = facts(world_size=8, pp=2, tp=2, ep=2)


def against(candidate: RunRecord, *, controls: bool = True, **others: object) -> Comparison:
    baseline = run("base", 1e-6, **facts(world_size=1))
    found = compare_runs("A change", baseline, candidate, controls=CONTROLS if controls else ())
    return replace(found, **others)  # type: ignore[arg-type]


def scaled(record: RunRecord, quantity: str, factor: float, first: int = 0) -> RunRecord:
    scalars = {key: values.copy() for key, values in record.scalars.items()}
    scalars[quantity][first:] *= factor
    return replace(record, scalars=scalars)


def assert_alone(page: Page) -> None:
    """Nothing is loaded, and each section is there once."""
    assert all(each.startswith(("#", "data:")) for each in page.loads), page.loads
    assert len(set(page.ids)) == len(page.ids)
    assert set(page.loads) >= {f"#{name}" for name in SECTIONS} and set(SECTIONS) <= set(page.ids)


@pytest.mark.parametrize(
    "verdict, make, words",
    [
        (Verdict.IDENTICAL, lambda: run("base", 1e-6), "loads of 1 layers"),
        (Verdict.INSIDE, lambda: run("other", 1e-6, seed=9), "the baseline and 8 control runs"),
        (
            Verdict.DIFFERENT,
            lambda: scaled(run("other", 1e-6, seed=9), "grad_norm", 1.01, 10),
            "First outside at step 11: grad_norm is ",
        ),
    ],
)
def test_comparison_page_begins_with_verdict(verdict: Verdict, make: Callable, words: str):
    comparison = against(make())
    assert comparison.verdict is verdict
    html = comparison_page(comparison)
    page = Page(html)
    top = page.text[""]
    # Before anything but the title.
    assert top.index("A change") < top.lower().index(verdict.words) < top.index("Curves")
    assert words in top
    assert_alone(page)
    said = ["no band"] if verdict is Verdict.IDENTICAL else ["its 8 control runs", "0.01 %"]
    assert all(each in page.text["band"] for each in said)
    assert html == comparison_page(comparison)


def test_comparison_page_has_a_row_for_each_cost_that_has_a_limit():
    costs = [
        CostCheck(TIME, [1.0, 1.01, 1.0], [1.3, 1.31, 1.3], 0.1),
        CostCheck(MEMORY, [2], [2], 0.1),
    ]
    page = Page(comparison_page(against(run("base", 1e-6), costs=costs)))
    assert "Identical bits, but too slow" in page.text[""]
    time, memory = page.tables["costs"][1:]
    assert time[:5] == ["time per step", "1 s", "1.3 s", "+30.0 %", "+10 %"]
    assert time[-1] == "too slow"
    assert memory[2:] == ["2 GiB", "+0.0 %", "+10 %", "2 ", "2 ", "within the limit"]
    assert "costs" not in Page(comparison_page(against(run("base")))).tables


def test_page_of_pinned_routes_shows_both_verdicts_and_the_flips():
    ones = np.ones((30, 2))
    flips = [
        Flips(range(1, 31), ["layers.1", "layers.2"], np.full(30, 100.0), n * ones, ones / 8, ones)
        for n in (2.0, 1.0, 4.0)
    ]
    free = against(run("other", 1e-6, seed=9))
    found = against(scaled(run("other", 1e-6, seed=9), "grad_norm", 1.01), free=free, flips=flips)
    page = Page(comparison_page(found))
    top = page.text[""]
    assert top.index("Different with pinned") < top.index("Inside the noise band with free routes")
    _, total, _, last = page.tables["flips"]
    assert total == ["all", "120", "2", "1 to 4", "0.12", "1"] and last[:2] == ["layers.2", "60"]
    assert "flipped tokens of all layers" in page.text["flips"]
    assert_alone(page)


def test_quantity_outside_the_band_is_first():
    candidate = scaled(run("other", 1e-6, seed=9), "grad_norm", 1.01, 10)
    heads, first, *_ = Page(comparison_page(against(candidate))).tables["quantities"]
    worst = dict(zip(heads, first, strict=True))
    assert worst["quantity"] == "grad_norm"
    assert float(worst["reach"]) > 1 and int(worst["steps out"]) == 10
    assert float(worst["relative difference"]) == pytest.approx(0.01, rel=1e-2)


def test_names_are_escaped():
    evil = replace(run("<b>x</b>&", **EIGHT, code="<script>1</script>"), folder=Path("/a<i>b"))
    html = comparison_page(against(evil, title="<u>title", caveats=["1 < 2 <s>"]))
    for text in ("<b>x", "<script>", "<i>b", "<u>title", "<s>"):
        assert text not in html
    page = Page(html)
    assert "candidate <b>x</b>&" in page.text["curves"] and "1 < 2 <s>" in page.text[""]


def test_a_page_of_many_experts_stays_small():
    pair = [
        run(f"run {i}", 1e-6, i, layers=58, rows=[9] * 256, steps=range(1, 301), **EIGHT)
        for i in range(2)
    ]
    html = comparison_page(Comparison("DeepSeek-V3", *pair, Verdict.UNJUDGED))
    assert len(html) < 4e6
    assert "busiest experts" in Page(html).text["load"]


def test_load_without_a_finite_number_is_drawn():
    load = Load("a", "busiest experts", [1, 2], {"layers.1": np.full((1, 2), np.nan)})
    assert "layers.1" in charts(load_panels([load]))["busiest experts, a"]
