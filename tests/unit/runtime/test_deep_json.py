"""JSON that nests 5,000 deep, in each file that a run writes and reads again: one line that names
the file, or left alone where a foreign line is, and never a RecursionError."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from titan_moe.checkpoint.manifest import read_manifest
from titan_moe.checkpoint.train_state import read_train_state
from titan_moe.config.checks.run_folder import check_run_folder
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.debug.hang.reports import read_report
from titan_moe.metrics.jsonl import EVENTS, JsonLines, read_json_lines
from titan_moe.profiling.trace import TraceError, read_trace
from titan_moe.runtime.errors import RunError
from titan_moe.verify.compare.records import read_run

DEEP = '{"step":' * 5000 + "1" + "}" * 5000


def _read_curves(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    read_run(folder)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("manifest.json", read_manifest),
        ("train_state.json", read_train_state),
        ("run.json", _read_curves),
        ("hang-20260101-000000.json", read_report),
        ("rank-0.json", lambda folder: read_trace(folder / "rank-0.json")),
    ],
)
def test_it_is_refused_in_one_line_that_names_the_file(
    tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    (tmp_path / name).write_text(DEEP)
    with pytest.raises((RunError, ConfigError, TraceError), match=re.escape(name)) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_line_of_metrics_is_left_alone(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", EVENTS):
        path = tmp_path / name
        path.write_text(f'{{"step": 1}}\n{DEEP}\n{{"step": 2}}\n{{"step": 3}}\n{DEEP}')
        steps = [line["step"] for line in read_json_lines(path)]
        assert [step for step in steps if isinstance(step, int)] == [1, 2, 3]
        JsonLines(path, resume_step=2).close()
        assert path.read_text().startswith(f'{{"step": 1}}\n{DEEP}\n{{"step": 2}}\n')
        assert '{"step": 3}' not in path.read_text()


def test_a_manifest_that_loading_will_refuse_says_nothing_of_the_run(tmp_path: Path) -> None:
    at = tmp_path / "checkpoint/step-1"
    at.mkdir(parents=True)
    job = JobConfig(**{"job": {"dump_folder": str(tmp_path)}})
    (at / "manifest.json").write_text(json.dumps({"job": {"debug": {"seed": 7}}}))
    assert len(check_run_folder(job, {})) == 1
    (at / "manifest.json").write_text(DEEP)
    assert check_run_folder(job, {}) == []
