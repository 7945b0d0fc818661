"""Pages of runs and of suites, and the command."""

import json
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import read_configuration

from tests.support.commands import run_command
from tests.support.paths import REPO
from tests.support.report_cases import Page, facts
from tests.support.verdict_cases import run
from titan_moe.planner.step_time import REGIONS
from titan_moe.verify.compare.records import read_run
from titan_moe.verify.compare.suite import SuiteRow, suite_page
from titan_moe.verify.report.pages import runs_page


def write(folder: Path, steps: int, *, tail: str = "") -> Path:
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "loss": 6 / step, "grad_norm": None if step == 3 else 1.0, "data": 7}
        | {"lr": 1e-3}
        | {f"moe/layers.{layer}/max_over_mean": 1 + layer / step for layer in (1, 2)}
        for step in range(1, steps + 1)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + tail)
    (folder / "config.toml").write_text("[training]\nsteps = 30\n")
    (folder / "run.json").write_text(json.dumps(facts(world_size=1)))
    return folder


def test_runs_page_of_a_run_without_expert_counts(tmp_path: Path):
    # Its last line is being written.
    record = read_run(write(tmp_path / "a <run>", 5, tail='{"step": 6, "lo'))
    busiest = record.scalars["moe/layers.2/max_over_mean"]
    assert busiest == pytest.approx([3, 2, 5 / 3, 1.5, 1.4])
    html = runs_page("One run", [record])
    page = Page(html)
    assert "its last step is 5 of 30" in page.text[""]
    assert "grad_norm is not finite, or missing, in 1 of 5 steps, first in step 3" in page.text[""]
    assert "busiest experts" in page.text["load"] and "A row is a layer: its " in page.text["load"]
    assert page.text["curves"].count("learning rate") == 2, "title and unit"
    assert "<run>" not in html and "a <run> (one rank): step 5" in page.text[""]
    assert page.tables["configuration"][1:] == [["training.steps", "30", "10000"]]
    assert all(each.startswith(("#", "data:")) for each in page.loads)
    assert set(page.text) == {"", "curves", "load", "configuration", "environment"}


def test_runs_page_shows_the_parts_of_a_profiled_step(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", 5)
    measured = dict.fromkeys(REGIONS, 0.0) | {"exchange": 210.0, "products": 300.0}
    expected = measured | {"exchange": 120.0}
    summary = {"step_ms": 600.0, "measured_parts": measured, "predicted_parts": expected}
    (folder / "traces" / "step-20").mkdir(parents=True)
    (folder / "traces" / "step-20" / "summary.json").write_text(json.dumps(summary))
    page = Page(runs_page("One run", [read_run(folder)]))
    says = "70 % of this layout's bound; largest gap: exchange (measured 210.0 ms, predicted 120.0"
    assert says in page.text["parts"]
    for word in ("a, measured", "a, predicted", "of a profiled step", "products"):
        assert word in page.text["parts"]


def test_runs_page_lists_bad_steps(tmp_path: Path):
    folder = write(tmp_path / "a", 5)
    event = {"step": 4, "time": "2026-01-02T03:04:05+00:00", "decision": "skip", "line": "<spike>"}
    (folder / "events.jsonl").write_text(json.dumps(event) + '\n{"step": 5}\n{"st')
    html = runs_page("One run", [read_run(folder)])
    page = Page(html)
    assert 'href="#events"' in html and page.tables["events"] == [
        ["run", "time", "step", "decision", "why"],
        ["a", "2026-01-02T03:04:05+00:00", "4", "skip", "<spike>"],
        ["a", *["\N{EM DASH}"], "5", *["\N{EM DASH}"] * 2],
    ]


def test_runs_page_of_several_runs():
    runs = [
        run("a", **facts(world_size=1), config={"x": {"y": 1}}),
        run("b", **facts(world_size=4, tp=2, ep=2), config={"x": {"y": 2}}),
        run("c", steps=[2, 4, 6], **facts(world_size=1), config={"x": {"y": 1}}),
    ]
    page = Page(runs_page("Three", runs))
    assert page.tables["configuration"] == [["key", "a", "b", "c"], ["x.y", "1", "2", "1"]]
    words = ["one rank", "dp_shard=2, tp=2, edp=2, ep=2", "one rank"]
    assert page.tables["environment"][1] == ["layout", *words]


def test_report_run_writes_page(tmp_path: Path):
    first, second = write(tmp_path / "x/run", 4), write(tmp_path / "y/run", 3)
    done = run_command("report", "run", first, second / "metrics.jsonl")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(first / "report.html")]
    assert "x/run" in (first / "report.html").read_text()
    (tmp_path / "empty").mkdir()
    failed = run_command("report", "run", first, tmp_path / "empty", "--out", tmp_path / "out")
    assert failed.returncode == 2 and not (tmp_path / "out").exists()
    assert "empty: there is no metrics.jsonl" in failed.stderr


@pytest.mark.parametrize("ok", [True, False])
def test_suite_page(ok: bool):
    rows = [
        SuiteRow("fine", "identical bits", "identical bits", True, "", 61.0, "fine/report.html"),
        SuiteRow("<x>", "inside", "different", ok, "first at step 3\nby loss", 4.5),
    ]
    page = Page(suite_page("Job & co", rows))
    total = f"{1 + ok} of 2 comparisons are as expected; 1 min 6 s."
    assert total in page.text[""] and "Job & co" in page.text[""]
    assert page.loads == ["fine/report.html"]
    # A comparison that failed comes first.
    names = [row[1] for row in page.tables[""]]
    assert names == (["comparison", "fine", "<x>"] if ok else ["comparison", "<x>", "fine"])
    assert ("NOT as expected" in page.text[""]) is not ok


def test_every_template_is_package_data():
    folder = REPO / "titan_moe" / "verify" / "report"
    data = read_configuration(REPO / "pyproject.toml", expand=False)["tool"]["setuptools"]
    patterns = data["package-data"]["titan_moe.verify.report"]
    packed = {path for pattern in patterns for path in folder.glob(pattern)}
    assert packed == {
        path for path in folder.rglob("*") if path.suffix in (".html", ".css", ".toml", ".mplstyle")
    }
