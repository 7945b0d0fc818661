"""The launcher: torchrun's command line, signals, exit codes, and the line about a failed run."""

import json
import os
import re
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import run_among
from tests.support.paths import REPO
from titan_moe.cli.train import COMMAND
from titan_moe.config.job_config import Checkpoint, Job, JobConfig, Training
from titan_moe.runtime import torchrun
from titan_moe.runtime.errors import Failure, RunError, explain
from titan_moe.runtime.launch import cpu_threads
from titan_moe.runtime.torchrun import Nodes, start_ranks

_ALONE = Nodes()
Monkeypatch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]
Start = Callable[..., int]


@pytest.fixture(autouse=True)
def _hangs_up() -> Iterator[None]:
    """Let SIGHUP end processes, also where nohup has started the suite."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: Monkeypatch) -> Iterator[Start]:
    """Runs a Python script in torchrun's place, whose arguments are those for torchrun."""
    plain, numbers = torchrun._torchrun, [*torchrun.EXIT_CODES, signal.SIGALRM]
    handlers = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def run(script: str, *words: str, **chosen: Any) -> int:
        monkeypatch.setattr(
            torchrun, "_torchrun", lambda *all: [sys.executable, "-c", script, *plain(*all)[3:]]
        )
        settings = {"folder": tmp_path, "nodes": _ALONE, "stop_timeout_s": None} | chosen
        return start_ranks(["train", *words], ranks=3, environment=os.environ, **settings)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_torchrun_ignores_variables_of_a_pod(monkeypatch: Monkeypatch, start: Start) -> None:
    """torchrun would take from them each option that it is not given, such as --nnodes."""
    monkeypatch.setenv("PET_NNODES", "2")
    assert start("import os, sys; sys.exit('PET_NNODES' in os.environ)") == 0


_MEET = "--rdzv-backend c10d --rdzv-endpoint"


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (Nodes(), f"{_MEET} RECORDS/meeting --rdzv-conf store_type=file,keep_alive_interval=3600"),
        (
            Nodes(2, 1, "node0:29500", max_restarts=4),
            f"--max-restarts 4 --nnodes 2 {_MEET} node0:29500 --rdzv-id 77 --rdzv-conf is_host=0",
        ),
    ],
)
def test_torchrun_command_names_ranks_and_meeting(
    nodes: Nodes, words: str, tmp_path: Path, start: Start, capsys: Capture
) -> None:
    out = tmp_path / "words"
    script = f"import sys; print(*sys.argv[1:], file=open({str(out)!r}, 'w'))"
    assert start(script, "--training.steps=3", nodes=nodes) == 0
    assert re.sub(r"\S+(?=/meeting)", "RECORDS", out.read_text()) == (
        f"--nproc-per-node 3 {words} -m titan_moe train --training.steps=3\n"
    )
    (log,) = (tmp_path / "launch").iterdir()
    assert log.read_text().endswith(out.read_text())
    assert capsys.readouterr().out == f"starting 3 rank(s) with torchrun, log {log}\n"


_LOOPBACK = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


def shell(words: str, folder: Path, programs: dict[str, str], **variables: Any) -> str:
    """Returns the variables that functions of scripts/environment.sh have set."""
    unset = "unset GLOO_SOCKET_IFNAME GLIBC_TUNABLES"
    sets = " ".join(f"{name}={value}" for name, value in variables.items())
    script = f"set -euo pipefail; {unset}; export X= {sets}; . {REPO}/scripts/environment.sh"
    done = run_among(programs, folder, "bash", "-c", f"{script}; {words}; env")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("host", ["node0", "own-name"])
def test_gloo_takes_the_interface_that_reaches_the_endpoint(host: str, tmp_path: Path) -> None:
    """The machine that hosts the endpoint may know its name as loopback."""
    route = "case $* in *127.0.1.1) echo local 127.0.1.1 dev lo src 127.0.0.1 uid 0;;"
    route += " *route*) echo 10.0.0.9 dev eth1 src 10.0.0.7 uid 0;;"
    route += " *10.0.0.7) echo 2: eth1 inet 10.0.0.7/24;; *) echo 1: lo inet 127.0.0.1/8;; esac"
    known = "case $2 in own-name) echo 127.0.1.1 STREAM;; *) echo 10.0.0.9 STREAM;; esac"
    use = partial(shell, "use_nodes; use_interface", tmp_path, {"ip": route, "getent": known})
    nodes, gloo = {"NNODES": 2, "RDZV_ENDPOINT": f"{host}:29500"}, "GLOO_SOCKET_IFNAME="
    assert f"{gloo}eth1\n" in use(**nodes)
    assert f"{gloo}eth9\n" in use(**nodes, GLOO_SOCKET_IFNAME="eth9")
    assert gloo not in use(NNODES=1, RDZV_ENDPOINT=f"{host}:29500")


@pytest.mark.parametrize(
    ("nodes", "chosen", "expected"),
    [
        (Nodes(), {}, _LOOPBACK | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (Nodes(), {"GLOO_SOCKET_IFNAME": "eth9"}, {"GLOO_SOCKET_IFNAME": "eth9"}),
        (Nodes(2, 1, "node0:29500"), {}, dict.fromkeys(_LOOPBACK)),
        (Nodes(), {"PYTORCH_ALLOC_CONF": "a"}, {"PYTORCH_ALLOC_CONF": "a"}),
        (Nodes(), {"PYTORCH_CUDA_ALLOC_CONF": "a"}, {"PYTORCH_ALLOC_CONF": "a"}),
    ],
)
def test_ranks_get_loopback_and_allocators_unless_the_user_sets_them(
    nodes: Nodes,
    chosen: dict[str, str],
    expected: dict[str, str | None],
    tmp_path: Path,
    monkeypatch: Monkeypatch,
    start: Start,
) -> None:
    for name in (*_LOOPBACK, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "variables"
    script = f"import json, os; json.dump(dict(os.environ), open({str(out)!r}, 'w'))"
    assert start(script, nodes=nodes) == 0
    variables = json.loads(out.read_text())
    assert {name: variables.get(name) for name in expected} == expected
    assert int(variables["OMP_NUM_THREADS"]) >= 1
    assert variables["TORCHINDUCTOR_COMPILE_THREADS"] == variables["OMP_NUM_THREADS"]


@pytest.mark.parametrize(
    ("chosen", "num_gpus", "kept"),
    [
        ({}, 0, True),
        ({}, 1, False),
        ({"MALLOC_ARENA_MAX": "1"}, 0, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=1"}, 0, False),
    ],
)
def test_allocators_tune_glibc_on_the_cpu_only(
    chosen: dict[str, str], num_gpus: int, kept: bool, tmp_path: Path
) -> None:
    lists = f"compgen() {{ [[ $1 == -G ]] && return {1 - num_gpus}; builtin compgen $*; }}"
    found = shell(f"{lists}; use_allocators", tmp_path, {}, **chosen)
    assert ("GLIBC_TUNABLES=glibc.malloc.mmap_max=0:" in found) is kept


def test_ranks_are_bound_to_numa_nodes_where_numactl_can(
    tmp_path: Path, monkeypatch: Monkeypatch
) -> None:
    (numactl := tmp_path / "numactl").touch(0o755)

    def is_bound(ends: str = "0", *, gpus: int = 3, cpus: int = cpu_threads(1)) -> bool:
        numactl.write_text(f"#!/bin/sh\nexit {ends}\n")
        monkeypatch.setattr(torchrun, "count_gpus", lambda environment: gpus)
        monkeypatch.setattr(os, "cpu_count", lambda: cpus)
        command = torchrun._torchrun(3, _ALONE, tmp_path, {"PATH": str(numactl.parent)})
        return "--nproc-per-node 3 --numa-binding node --rdzv" in " ".join(command)

    assert is_bound()
    assert not is_bound("1")  # A container may forbid it.
    assert not is_bound(gpus=2)  # The ranks say that there are too few.
    assert not is_bound(cpus=10_000)  # Those of a node may be others'.
    numactl.chmod(0o644)
    assert not is_bound()


# A stub of all ranks: signals its launcher, and answers the request that is left for it.
_ATTEMPT = (
    "import os, pathlib, sys\n"
    "records = pathlib.Path(os.environ['TITAN_MOE_ATTEMPTS'])\n"
    "(attempt := records / 'attempt-0').mkdir()"
)
_ASKS = (
    _ATTEMPT
    + """
import signal, time
for name, seconds in {signals}:
    os.kill(os.getppid(), getattr(signal, name))
    time.sleep(seconds)
end = time.monotonic() + 10
while not (records / "stop").exists() and time.monotonic() < end:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGUSR1)
(attempt / "stopped").touch()
sys.exit({code})
"""
)


_ASKED = [("SIGTERM", 0)]


@pytest.mark.parametrize(
    ("signals", "end", "code"),
    [
        (_ASKED, "0", 75),
        ([("SIGUSR1", 0)], "0", 75),
        ([("SIGUSR1", 0), ("SIGTERM", 0.1)] * 2, "0", 75),
        (_ASKED, "1", 1),  # It fails as it saves.
        (_ASKED, "(records / 'attempt-10').mkdir()", 0),  # The answer is an earlier attempt's.
    ],
)
def test_request_to_stop_ends_with_75_once_saved(
    signals: list, end: str, code: int, tmp_path: Path, monkeypatch: Monkeypatch, start: Start
) -> None:
    monkeypatch.setenv("TITAN_MOE_STOPPED", str(tmp_path / "marked"))
    script = _ASKS.format(signals=signals, code=end)
    assert start(script, stop_timeout_s=30) == code
    assert (tmp_path / "marked").exists() == (code == 75)


@pytest.mark.parametrize(("stop_timeout_s", "code"), [(30, 75), (None, 143)])
def test_request_during_checks_waits_for_torchrun(
    stop_timeout_s: int | None, code: int, tmp_path: Path, monkeypatch: Monkeypatch, start: Start
) -> None:
    job = JobConfig(
        job=Job(dump_folder=str(tmp_path)),
        checkpoint=Checkpoint(enable=stop_timeout_s is not None),
        training=Training(stop_timeout_seconds=stop_timeout_s or 1),
    )

    def check(*all: object) -> tuple[JobConfig, list[str]]:
        signal.raise_signal(signal.SIGUSR1)  # This thread gets it: earlier tests have left others.
        return job, []

    def starts(words: Sequence[str], **settings: Any) -> int:
        assert settings["stop_timeout_s"] == stop_timeout_s
        script = _ASKS.format(signals=[], code=0)
        return start(script, stop_timeout_s=stop_timeout_s)

    monkeypatch.setattr("titan_moe.prepare.job.check_all", check)
    monkeypatch.setattr(torchrun, "start_ranks", starts)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    options = {"one_process": False, "nodes": 1, "node_rank": 0, "endpoint": "", "max_restarts": 0}
    try:
        asked = COMMAND.run(Namespace(**options, dry_run=None, ranks=1, config=None, overrides=[]))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        signal.signal(signal.SIGUSR1, before)
    assert asked.exit_code == code


@pytest.mark.parametrize(
    ("signals", "timeout_s", "seconds", "code"),
    [
        ([("SIGTERM", 1.2), ("SIGTERM", 0)], 30, 1.2, 143),
        ([("SIGTERM", 0)], 1, 1, 143),
        ([("SIGTERM", 0)], None, 0, 143),
        ([("SIGUSR1", 0)], None, 0, 143),
        ([("SIGHUP", 0)], 30, 0, 143),
        ([("SIGINT", 0)], 30, 0, 130),
    ],
)
def test_second_sigterm_and_other_signals_end_the_run_at_once(
    signals: list, timeout_s: int | None, seconds: float, code: int, start: Start, capsys: Capture
) -> None:
    script = _ASKS.format(signals=signals, code="time.sleep(60)")
    began = time.monotonic()
    assert start(script, stop_timeout_s=timeout_s) == code
    assert seconds <= time.monotonic() - began < seconds + 20
    *_, interrupted, last = capsys.readouterr().out.splitlines()
    assert interrupted.startswith("interrupted; ")
    assert ("goes on from the last checkpoint" in interrupted) == (timeout_s is not None)
    assert last.startswith("the files of this run are in /")


def test_run_under_nohup_outlives_its_terminal(start: Start) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    script = "import os, signal, time; os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.3)"
    assert start(script, stop_timeout_s=30) == 0


def test_launch_log_has_torchruns_report_and_stacks_of_crashes(
    tmp_path: Path, start: Start, capsys: Capture
) -> None:
    Failure(1.0, 0, 2, ["no such thing"], expected=True).save(tmp_path)
    script = (
        f"{_ATTEMPT}; import shutil; sys.stderr.write('a page\\n')\n"
        f"shutil.copy({str(tmp_path / 'rank-0.json')!r}, attempt)\n"
        "def crashes():\n    os.abort()\ncrashes()"
    )
    assert start(script) == 2
    assert capsys.readouterr().err == "error: no such thing\n"
    (log,) = (tmp_path / "launch").iterdir()
    assert " -m titan_moe train\na page\n" in log.read_text() and "in crashes" in log.read_text()


def test_unwritable_run_folder_is_reported_in_one_line(tmp_path: Path, start: Start) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot write to job\.dump_folder=.*: Not a directory"):
        start("", folder=tmp_path / "file" / "outputs")


_PAGE = """
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : {first} (pid: 11)
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : {root} (pid: 10)
"""
_LATE = Failure(3.0, 0, 1, ["late"], expected=True)
_FIRST = Failure(2.0, 1, 2, ["first", "and second"], expected=True)
_LOST = Failure(1.0, 2, 1, ["rank 2: RuntimeError: connection closed"], expected=False)


@pytest.mark.parametrize(
    ("failures", "page", "says", "code"),
    [
        ([_LATE, _FIRST, _LOST], _PAGE.format(first=2, root=1), "first and second", 2),
        ([_LOST], _PAGE.format(first=-9, root=1), "rank 1 was killed by SIGKILL (often: out", 137),
        ([], _PAGE.format(first=-15, root=-7), "SIGBUS (often: a file was cut short", 135),
        ([], _PAGE.format(first=-15, root=-11), "rank 0 was killed by SIGSEGV;", 139),
        ([_LOST], _PAGE.format(first=-15, root=1), "connection closed (traceback in ", 1),
        ([], _PAGE.format(first=-15, root=3), "rank 0 ended with exit code 3", 3),
        ([], "DistNetworkError: ... port: 29500 EADDRINUSE", "port of RDZV_ENDPOINT=node0:", 1),
        ([], "RendezvousConnectionError: failed", "meet at RDZV_ENDPOINT=node0:29500", 1),
        ([], "Traceback\nValueError: no\n", "without naming a rank (ValueError: no)", 1),
    ],
)
def test_explain_names_the_first_cause(
    failures: list[Failure], page: str, says: str, code: int, tmp_path: Path
) -> None:
    for number, records in enumerate([[Failure(0.5, 0, 2, ["mended"], expected=True)], failures]):
        attempt = tmp_path / f"attempt-{9 + number}"
        attempt.mkdir()
        for failure in records:
            failure.save(attempt)
    log = tmp_path / "torchrun.log"
    log.write_text(page)
    lines, found = explain(tmp_path, log, "node0:29500")
    assert says in " ".join(lines) and found == code
