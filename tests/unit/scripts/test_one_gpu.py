"""A call on one GPU that is cut short at any moment has written what it saw."""

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

import pytest

from scripts.first_hour.parts import Part, Seen
from scripts.first_hour.session import REPO, Session
from scripts.one_gpu import __main__ as one_gpu
from scripts.one_gpu.stages import GPU_FILES, all_stages


def chosen_tests() -> list[tuple[str, ...]]:
    """Paths of tests in the scripts, each with the -k of its list."""
    found = []
    for file in sorted((REPO / "scripts").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Tuple | ast.List):
                continue
            words = [each.value for each in node.elts if isinstance(each, ast.Constant)]
            tests = [word for word in words if str(word).startswith("tests/")]
            keys = ("-k", words[words.index("-k") + 1]) if "-k" in words else ()
            found += [(test, *keys) for test in tests]
    for file in (REPO / "scripts").glob("*.sh"):
        found += [(test,) for test in re.findall(r"tests/[\w/]+\.py[\w:]*", file.read_text())]
    files = [f"tests/gpu/test_{name}.py" for names in GPU_FILES.values() for name in names]
    return sorted({*found, *((file,) for file in files)})


@pytest.mark.parametrize("words", chosen_tests(), ids=" ".join)
def test_what_a_script_selects_are_tests(words: tuple[str, ...]) -> None:
    if len(words) == 1 and "::" not in words[0]:
        assert (REPO / words[0]).exists()
        return
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *words]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


CALL = ("--device", "cpu", "--commit", "abc")
LACKS = "import sys; sys.modules.update(dict.fromkeys({names}))  # Imports of these raise."


def writes(session: Session) -> Seen:
    (session.folder / "summary.json").write_text("{}")
    return Seen(session.run(sys.executable, "-c", "print('answer', 42)").strip(), {"answer": 42})


def hangs(session: Session) -> Seen:
    return Seen(session.run(sys.executable, "-c", "import time; time.sleep(600)"))


def is_interrupted(session: Session, out: Path) -> Seen:
    """The JSON that is there while the stage runs is what a kill would leave."""
    (out / "then.json").write_text((out / "one_gpu.json").read_text())
    raise KeyboardInterrupt


def stages_of(file: Path) -> dict[str, tuple[str, str]]:
    stages = json.loads(file.read_text())["stages"]
    return {stage["name"]: (stage["verdict"], stage["line"]) for stage in stages}


def test_stage_that_hangs_ends_at_its_limit_and_one_without_time_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [
        Part("writes", "?", writes, 9),
        Part("hangs", "?", hangs, 2),
        Part("is late", "?", writes, 300),
    ]
    monkeypatch.setattr(one_gpu, "all_stages", lambda: stages)
    assert one_gpu.main([str(tmp_path), *CALL, "--seconds", "40"]) == 1
    found = stages_of(tmp_path / "one_gpu.json")
    assert found["writes"] == ("passed", "answer 42")
    assert found["hangs"] == ("failed", "stopped at the limit of 2 s")
    assert found["is late"][0] == "not seen" and "s were left of 40" in found["is late"][1]
    assert "answer 42" in (tmp_path / "log.txt").read_text()
    with tarfile.open(tmp_path / "files.tar.gz") as archive:
        assert archive.getnames() == ["writes/summary.json"]


def test_call_that_ends_in_a_stage_keeps_the_stages_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = partial(is_interrupted, out=tmp_path)
    stages = [Part("writes", "?", writes, 9), Part("cut", "?", cut, 9), Part("c", "?", hangs, 9)]
    monkeypatch.setattr(one_gpu, "all_stages", lambda: stages)
    assert one_gpu.main([str(tmp_path), *CALL]) == 130
    then = stages_of(tmp_path / "then.json")
    assert then == stages_of(tmp_path / "one_gpu.json")
    assert then == {
        "writes": ("passed", "answer 42"),
        "cut": ("not seen", "was running when the call ended: see log.txt"),
        "c": ("not seen", "not started"),
    }


def test_words_choose_stages_and_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    names = [stage.name for stage in one_gpu._chosen("profile,slice")]
    assert names == ["machine", "profile", "slice qwen3", "slice deepseek_v3"]
    assert one_gpu.main(["out", *CALL, "--only", "gate,slize"]) == 2
    assert "error: --only gate,slize: choose from machine, kernels" in capsys.readouterr().err


def test_call_without_git_asks_for_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(one_gpu, "code_revision", lambda checkout: None)
    assert one_gpu.main([str(tmp_path), "--device", "cpu"]) == 2
    assert "error: no git here: --commit ID" in capsys.readouterr().err


def call(folder: Path, lacking: set[str], *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the script where packages cannot be imported."""
    (folder / "sitecustomize.py").write_text(LACKS.format(names=lacking))
    variables = {"PYTHON": sys.executable, "PYTHONPATH": str(folder)}
    command = [REPO / "scripts" / "one_gpu.sh", folder / "out", *CALL, *words]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)


def test_call_without_pydantic_says_how_to_fetch_it(tmp_path: Path) -> None:
    """Wheels that lie there are for Python 3.12, and hidden too."""
    run = call(tmp_path, {"pydantic"})
    assert run.returncode == 1 and run.stderr.count("\n") == 1
    assert "run scripts/one_gpu.sh wheels first, where there is a network" in run.stderr


@pytest.mark.slow
@pytest.mark.timeout(15 * 60)
def test_call_on_a_cpu_runs_every_stage_without_the_packages_that_such_a_machine_lacks(
    tmp_path: Path,
) -> None:
    lacking = {"datasets", "matplotlib", "pyarrow", "tiktoken", "torchao", "zstandard"}
    run = call(tmp_path, lacking, "--seconds", "600")
    found = stages_of(tmp_path / "out" / "one_gpu.json")
    assert run.returncode == 0, found
    assert list(found) == [stage.name for stage in all_stages()]
    need_a_gpu = {"kernels", "training", "attention", "others", "sanitizer"}
    assert {name for name, (verdict, _) in found.items() if verdict != "passed"} == need_a_gpu
    assert all("need" in found[name][1] for name in need_a_gpu)
