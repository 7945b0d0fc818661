"""The first hour: a part that fails stops no other, and a second start goes on."""

import json
import sys
from pathlib import Path

import pytest

from scripts.first_hour import __main__ as first_hour
from scripts.first_hour.parts import _LAYOUTS, Part, Seen, all_parts
from scripts.first_hour.session import Machine, Session, UnseenError
from titan_moe.config.job_config import JobConfig
from titan_moe.distributed.parallel_dims import parallel_dims
from titan_moe.verify.layouts.layouts import apply_layout, parse


def passes(session: Session) -> Seen:
    return Seen(session.run(sys.executable, "-c", "print(6 * 7)").strip(), {"answer": 42})


def fails(session: Session) -> Seen:
    session.run(sys.executable, "-c", "print('no such GPU'); raise SystemExit(3)")
    raise AssertionError


def hangs(session: Session) -> Seen:
    return Seen(session.run(sys.executable, "-c", "import time; time.sleep(600)"))


def has_a_mistake(session: Session) -> Seen:
    raise KeyError("loss")


def is_not_seen(session: Session) -> Seen:
    raise UnseenError("needs a GPU")


PARTS = [
    Part("fails", "?", fails, 60),
    Part("hangs", "?", hangs, 1),
    Part("has a mistake", "?", has_a_mistake, 60),
    Part("is not seen", "?", is_not_seen, 60),
    Part("passes", "?", passes, 60),
]


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_hour, "all_parts", lambda machine: PARTS)


def test_part_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    assert first_hour.main([str(tmp_path), "--device", "cpu"]) == 1
    parts = json.loads((tmp_path / "first_hour.json").read_text())["parts"]
    assert {part["name"]: (part["verdict"], part["line"]) for part in parts} == {
        "fails": ("failed", "a command of log.txt ended with 3: no such GPU"),
        "hangs": ("failed", "stopped at the limit of 1 s"),
        "has a mistake": ("failed", "KeyError: 'loss'"),
        "is not seen": ("not seen", "needs a GPU"),
        "passes": ("passed", "42"),
    }
    assert parts[-1]["figures"] == {"answer": 42}
    page = (tmp_path / "first_hour.html").read_text()
    assert all(name in page for name in ("no such GPU", "needs a GPU", "KeyError"))
    assert "no such GPU" in (tmp_path / "fails" / "log.txt").read_text()


def test_second_start_runs_what_has_not_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path), "--device", "cpu"]
    first_hour.main(arguments)
    marks = {part.name: tmp_path / part.name.replace(" ", "-") / "mark" for part in PARTS}
    for mark in marks.values():
        mark.touch()
    first_hour.main(arguments)
    assert [name for name, mark in marks.items() if mark.exists()] == ["passes"]


def test_unknown_part_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert first_hour.main([str(tmp_path), "--device", "cpu", "--only", "gtae"]) == 2
    assert capsys.readouterr().err.startswith("error: --only gtae: choose from fails, hangs")


@pytest.mark.parametrize(("device", "ranks"), [("cuda", 8), ("cuda", 32), ("cuda", 64), ("cpu", 4)])
def test_benchmarks_are_those_of_the_machine(device: str, ranks: int) -> None:
    names = [part.name for part in all_parts(Machine(device, ranks)) if "bench" in part.name]
    assert names and len(names) == len(set(names))


@pytest.mark.parametrize(
    ("ranks", "layout"), [(ranks, text) for ranks, several in _LAYOUTS.items() for text in several]
)
def test_layouts_that_are_compared_are_legal(ranks: int, layout: str) -> None:
    parallel_dims(apply_layout(JobConfig(), parse(layout)).parallelism, ranks)
