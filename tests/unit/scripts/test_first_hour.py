"""The first hour: a part that fails stops no other, and a second start goes on."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench import gpu_moe, measure
from scripts.first_hour import __main__ as first_hour
from scripts.first_hour import runner
from scripts.first_hour.parts import _LAYOUTS, Part, Seen, all_parts, run_tests
from scripts.first_hour.runner import run_part
from scripts.first_hour.session import REPO, Machine, Session, UnseenError
from tests.support.jobs import is_running, until
from titan_moe.config.job_config import JobConfig
from titan_moe.distributed.parallel_dims import parallel_dims
from titan_moe.runtime.process_pool import TIMEOUT_S
from titan_moe.verify.layouts.layouts import apply_layout, parse


def prints(session: Session, code: str) -> Seen:
    return Seen(session.run(sys.executable, "-c", code).strip(), {"answer": 42})


def raises(session: Session, error: Exception) -> Seen:
    raise error


SLOW_TESTS = """
import time

def test_that_passes(record_property): record_property("error", 1e-6)

def test_that_fails(): assert False

def test_that_is_slow():
    open("{}", "w").close()
    time.sleep(600)
"""


class PatientSession(Session):
    """Counts its limit from the start of the test that is slow, which a busy machine delays."""

    def start(self, *words: object, env: Mapping[str, str] | None = None) -> Any:
        started = super().start(*words, env=env)
        until((self.folder / "slow").exists, TIMEOUT_S)
        self._began = time.monotonic()
        return started


def runs_slow_tests(session: Session) -> Seen:
    file = session.folder / "test_slow.py"
    file.write_text(SLOW_TESTS.format(session.folder / "slow"))
    session.figures.write_text('{"rows": [1, 2]}')
    return run_tests(session, [str(file), "-p", "no:cacheprovider"])


PARTS = [
    Part("fails", "?", partial(prints, code="print('no such GPU'); raise SystemExit(3)"), 60),
    Part("hangs", "?", partial(prints, code="import time; time.sleep(600)"), 1),
    Part("has a mistake", "?", partial(raises, error=KeyError("loss")), 60),
    Part("is not seen", "?", partial(raises, error=UnseenError("needs a GPU")), 60),
    Part("passes", "?", partial(prints, code="print(6 * 7)"), 60, many_nodes=True),
]


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_hour, "all_parts", lambda machine: PARTS)


def test_part_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    assert first_hour.main([str(tmp_path), "--device", "cpu"]) == 1
    parts = json.loads((tmp_path / "first_hour.json").read_text())["parts"]
    assert {part["name"]: (part["verdict"], part["line"]) for part in parts} == {
        "fails": ("failed", "a command of log.txt ended with 3: no such GPU"),
        "hangs": ("failed", "stopped at the limit of 3 s"),
        "has a mistake": ("failed", "KeyError: 'loss'"),
        "is not seen": ("not seen", "needs a GPU"),
        "passes": ("passed", "42"),
    }
    assert parts[-1]["figures"] == {"answer": 42}
    page = (tmp_path / "first_hour.html").read_text()
    assert all(name in page for name in ("no such GPU", "needs a GPU", "KeyError"))
    assert "no such GPU" in (tmp_path / "fails" / "log.txt").read_text()


def test_part_that_is_stopped_keeps_its_tests_its_figures_and_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "Session", PatientSession)
    part = Part("slow", "?", runs_slow_tests, limit_s=2)
    result = run_part(part, Machine("cpu", 1), tmp_path / "slow", part.limit_s)
    assert (result.verdict, result.line) == ("failed", "stopped at the limit of 2 s")
    tests = result.figures["tests"]
    assert (tests["passed"], tests["failure"]) == (1, 1) and tests["failed"] == ["test_that_fails"]
    assert tests["recorded"] == {"test_that_passes": {"error": "1e-06"}}
    assert result.figures["figures"] == {"rows": [1, 2]}
    assert any("test_that_passes" in line for line in result.figures["log"])


def test_second_start_runs_what_has_not_passed_and_shows_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [str(tmp_path), "--device", "cpu"]
    first_hour.main(arguments)
    marks = {part.name: tmp_path / part.name.replace(" ", "-") / "mark" for part in PARTS}
    for mark in marks.values():
        mark.touch()
    for name in ("fails", "passes"):
        first_hour.main([*arguments, "--only", name])
    assert [name for name, mark in marks.items() if not mark.exists()] == ["fails"]
    assert (tmp_path / "fails.1/mark").exists()
    page = tmp_path / "first_hour.html"
    assert "1 passed, 0 goals missed, 1 not seen, 3 failed, of 5 parts" in page.read_text()
    monkeypatch.setattr(first_hour, "_CPU_RANKS", 2)  # Other ranks, other answers.
    first_hour.main([*arguments, "--only", "passes"])
    assert not marks["passes"].exists()
    assert "1 passed, 0 goals missed, 0 not seen, 0 failed, of 5 parts" in page.read_text()


def test_other_nodes_rename_no_folder_and_write_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setenv("RDZV_ENDPOINT", "a:1")
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes" / "begun").touch()
    assert first_hour.main([str(tmp_path), "--device", "cpu"]) == 0
    names = sorted(path.name for path in tmp_path.rglob("*"))
    assert names == ["begun", "passes", "passes-node1.txt"]


def test_interrupt_ends_the_command_that_runs(tmp_path: Path) -> None:
    pids = []

    def starts(session: Session) -> Seen:
        pids.append(session.start(sys.executable, "-c", "import time; time.sleep(600)")[0].pid)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_part(Part("waits", "?", starts, 60), Machine("cpu", 1), tmp_path / "waits", 60)
    assert not is_running(pids[0])


@pytest.mark.parametrize(
    ("variables", "words", "says"),
    [
        ({"NNODES": "x"}, "new", "NNODES=x must be a whole number"),
        ({"NODE_RANK": "-1"}, "new", "NODE_RANK=-1 must be a whole number"),
        ({"NODE_RANK": "1"}, "new", "NODE_RANK=1 must be below NNODES=1"),
        ({"NNODES": "0"}, "new", "NODE_RANK=0 must be below NNODES=0"),
        ({"NNODES": "2"}, "new", "NNODES=2 needs RDZV_ENDPOINT=HOST:PORT, not ''"),
        ({}, "file", "is a file, or below one: name a folder"),
        ({}, "file/new", "is a file, or below one: name a folder"),
        ({}, "new --only gtae", "--only gtae: choose from fails, hangs"),
    ],
)
def test_wrong_variable_folder_or_part_is_one_line(
    variables: dict[str, str],
    words: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert first_hour.main([*f"{tmp_path}/{words}".split(), "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and says in line


@pytest.mark.parametrize("main", [first_hour.main, gpu_moe.main])
def test_gpus_that_torch_cannot_use_stop_a_script_with_one_line(
    main: Callable[[list[str]], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "count_gpus", lambda environment: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^error: 8 GPUs found, but .*: install .*$"):
        main([])


@pytest.mark.parametrize(("device", "ranks"), [("cuda", 8), ("cuda", 32), ("cuda", 64), ("cpu", 4)])
def test_benchmarks_are_those_of_the_machine(device: str, ranks: int) -> None:
    names = [part.name for part in all_parts(Machine(device, ranks)) if "bench" in part.name]
    assert names and len(names) == len(set(names))


@pytest.mark.parametrize(
    ("ranks", "layout"), [(ranks, text) for ranks, several in _LAYOUTS.items() for text in several]
)
def test_layouts_that_are_compared_are_legal(ranks: int, layout: str) -> None:
    parallel_dims(apply_layout(JobConfig(), parse(layout)).parallelism, ranks)


@pytest.mark.full
@pytest.mark.timeout(45 * 60)
def test_first_hour_on_cpu_ranks_passes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command for GPUs runs whole on CPU ranks."""
    script = [str(REPO / "scripts" / "first_hour.sh"), str(tmp_path), "--device", "cpu"]
    assert subprocess.run(script).returncode == 0, capfd.readouterr().out
    parts = json.loads((tmp_path / "first_hour.json").read_text())["parts"]
    assert [part["name"] for part in parts] == [part.name for part in all_parts(Machine("cpu", 4))]
    assert [part["name"] for part in parts if part["verdict"] != "passed"] == ["kernels", "memory"]
