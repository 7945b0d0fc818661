"""Results: kept, resumed, and shown."""

import platform
from dataclasses import replace

import torch

from titan_moe.config.job_config import JobConfig
from titan_moe.runtime.revision import code_in_words, running_code
from titan_moe.verify.gradients.gate import Result, headline
from titan_moe.verify.gradients.sweep import (
    RESULTS_FILE,
    code_fingerprint,
    gate_page,
    summary,
    sweep,
)
from titan_moe.verify.layouts.layouts import parse

TASKS = [(parse(text), "float64") for text in ("dp_shard=1", "dp_shard=2", "tp=2,etp=2")]


class FakeGate:
    def __init__(self, failing: set[str] = frozenset()) -> None:
        self.job, self.device = JobConfig(), "cpu"
        self.failing = failing
        self.asked: list[str] = []

    def verify(self, layout, *, dtype: str) -> Result:
        self.asked.append(str(layout))
        status = "failed" if str(layout) in self.failing else "passed"
        lines = [f"{layout}: gradient <w>"] if status == "failed" else []
        return Result(str(layout), dtype, status, 1.5, 100, 1e-13, "loss", lines)


def run(gate, folder) -> list[Result]:
    return list(sweep(gate, TASKS, folder))


def test_failures_and_other_code_are_tried_again(tmp_path):
    failing = str(TASKS[1][0])
    run(FakeGate({failing}), tmp_path)
    again = FakeGate()
    assert all(result.passed for result in run(again, tmp_path))
    assert again.asked == [failing]
    path = tmp_path / RESULTS_FILE
    path.write_text(path.read_text().replace(code_fingerprint(again.job, "cpu"), "other"))
    anew = FakeGate()
    run(anew, tmp_path)
    assert len(anew.asked) == 3


def test_headline_joins_a_message_that_begins_on_the_next_line():
    frames = 'Traceback (most recent call last):\n  File "a.py", line 1\n'
    assert headline(f"{frames}RuntimeError: \nread twice\nmore") == "RuntimeError: read twice"
    assert headline(f"{frames}ValueError: one\ntwo") == "ValueError: one"


def test_summary_and_page_count_passed_and_failed_layouts(tmp_path):
    results = run(FakeGate({str(TASKS[1][0])}), tmp_path)
    results[2] = replace(results[2], worst=1e-11, worst_tensor="gradient norm.weight")
    facts = summary(results)
    assert (facts["passed"], facts["failed"], facts["refused"]) == (2, 1, 0)
    assert facts["worst_tensor"] == "gradient norm.weight" and facts["tensors_compared"] == 300
    rows = list(zip(results, [layout for layout, _ in TASKS], strict=True))
    html = gate_page("Layouts", rows, facts)
    assert "2 of 3 layouts pass." in html and "gradient &lt;w&gt;" in html
    assert f"torch {torch.__version__}, on {platform.node()}" in html
    assert code_in_words(running_code()) in html
    assert "http" not in html and "src=" not in html

    assert html.count("<tbody") == 3
