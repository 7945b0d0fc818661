"""How torchrun is called, what signals do to a run, and what is left of one that did not finish."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.terminal import on_terminal
from titan_moe.cli.train import COMMAND
from titan_moe.config.job_config import Checkpoint, Job, JobConfig, Training
from titan_moe.runtime import child, torchrun
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.failure import Failure
from titan_moe.runtime.torchrun import Nodes, allocators, start_ranks

_ALONE = Nodes()


def start(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    script: str,
    *words: str,
    nodes: Nodes = _ALONE,
    stop_timeout_s: int | None = None,
    has_saved: bool = False,
) -> int:
    """Run a Python script in torchrun's place; its arguments are those for torchrun."""
    plain = torchrun._torchrun
    monkeypatch.setattr(
        torchrun, "_torchrun", lambda *all: [sys.executable, "-c", script, *plain(*all)[1:]]
    )
    environment = {**os.environ, "SLURM_JOB_ID": "77"}
    environment.pop("OMP_NUM_THREADS", None)
    handlers = {number: signal.getsignal(number) for number in child.EXIT_CODES}
    try:
        return start_ranks(
            ["train", *words],
            ranks=3,
            nodes=nodes,
            folder=folder,
            stop_timeout_s=stop_timeout_s,
            has_saved=lambda: has_saved,
            environment=environment,
        )
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


_SAYS = "import os, sys; print(*sys.argv[1:], file=open({out!r}, 'w')); sys.exit({code})"


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (
            Nodes(),
            "--nproc-per-node 3 --rdzv-backend c10d --rdzv-endpoint RECORDS/meeting "
            "--rdzv-conf store_type=file,keep_alive_interval=3600",
        ),
        (
            Nodes(2, 1, "node0:29500", max_restarts=4),
            "--nproc-per-node 3 --max-restarts 4 --nnodes 2 --rdzv-backend c10d "
            "--rdzv-endpoint node0:29500 --rdzv-id 77 --rdzv-conf is_host=0",
        ),
    ],
)
def test_torchrun_gets_the_machines_and_the_job(
    nodes: Nodes,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = _SAYS.format(out=str(tmp_path / "words"), code=0)
    assert start(monkeypatch, tmp_path, script, "--training.steps=3", nodes=nodes) == 0
    told = re.sub(r"\S+(?=/meeting)", "RECORDS", (tmp_path / "words").read_text())
    assert told == f"{words} -m titan_moe train --training.steps=3\n"
    (log,) = (tmp_path / "launch").iterdir()
    assert log.read_text().endswith((tmp_path / "words").read_text())
    assert capsys.readouterr().out == f"starting 3 rank(s) with torchrun, log {log}\n"


@pytest.mark.parametrize(
    ("nodes", "chosen", "expected"),
    [
        (
            Nodes(),
            {},
            {
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "NCCL_SOCKET_IFNAME": "lo",
            },
        ),
        (Nodes(), {"GLOO_SOCKET_IFNAME": "eth9"}, {"GLOO_SOCKET_IFNAME": "eth9"}),
        (Nodes(2, 1, "node0:29500"), {}, {}),
    ],
)
def test_the_ranks_of_one_machine_talk_on_loopback(
    nodes: Nodes,
    chosen: dict[str, str],
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless the environment says otherwise."""
    for name in torchrun._LOOPBACK:
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    script = "import json, os; json.dump(dict(os.environ), open({!r}, 'w'))"
    assert start(monkeypatch, tmp_path, script.format(str(tmp_path / "told")), nodes=nodes) == 0
    told = json.loads((tmp_path / "told").read_text())
    assert {name: told[name] for name in expected} == expected
    assert nodes.number == 1 or not told.keys() & torchrun._LOOPBACK.keys()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, "expandable_segments:True None"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64 None"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "None backend:native"),
    ],
)
def test_segments_of_gpu_memory_grow_unless_the_user_says_otherwise(
    said: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "words"
    names = "os.environ.get('PYTORCH_ALLOC_CONF'), os.environ.get('PYTORCH_CUDA_ALLOC_CONF')"
    script = f"import os; print({names}, file=open({str(out)!r}, 'w'))"
    assert start(monkeypatch, tmp_path, script) == 0
    assert out.read_text().strip() == expected


@pytest.mark.parametrize(
    ("said", "num_gpus", "kept"),
    [
        ({}, 0, True),
        ({}, 1, False),
        ({"MALLOC_ARENA_MAX": "1"}, 0, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=1"}, 0, False),
    ],
)
def test_glibc_keeps_memory_on_the_cpu_unless_the_user_says_otherwise(
    said: dict[str, str], num_gpus: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_moe.runtime.torchrun.count_gpus", lambda environment: num_gpus)
    assert ("GLIBC_TUNABLES" in allocators(said)) is kept


_FAULTS = """
import resource, torch
def faults():
    x = torch.ones(64 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
first = faults()
print(faults() - first)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_a_tensor_takes_the_place_of_a_freed_one_of_its_size() -> None:
    environment = {**os.environ, **allocators({"CUDA_VISIBLE_DEVICES": ""})}
    run = subprocess.run(
        [sys.executable, "-c", _FAULTS], env=environment, capture_output=True, text=True, check=True
    )
    # 64 MiB are 16,384 pages.
    assert int(run.stdout) < 1000


def test_the_first_failure_s_line_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Failure(1.0, 0, 2, ["no such thing"], expected=True).save(tmp_path)
    script = (
        f"{_ATTEMPT}; import shutil; sys.stderr.write('a page\\n');"
        f"shutil.copy({str(tmp_path / 'rank-0.json')!r}, attempt);"
        "assert int(os.environ['OMP_NUM_THREADS']) >= 1; sys.exit(1)"
    )
    assert start(monkeypatch, tmp_path, script) == 2
    assert capsys.readouterr().err == "error: no such thing\n"
    (log,) = (tmp_path / "launch").iterdir()
    assert log.read_text().endswith(" -m titan_moe train\na page\n")


def test_a_signal_reaches_torchrun_and_its_own_code_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (
        "import os, pathlib, signal, sys, time\n"
        f"ended = pathlib.Path({str(tmp_path / 'ended')!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: (ended.touch(), sys.exit(1)))\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(20)"
    )
    assert start(monkeypatch, tmp_path, script) == 130
    assert (tmp_path / "ended").exists()
    assert capsys.readouterr().out.splitlines()[-1] == f"the files of this run are in {tmp_path}"


# A stub of all ranks: signals its launcher, and answers the request that is left for it.
_ATTEMPT = (
    "import os, pathlib, sys\n"
    "records = pathlib.Path(os.environ['TITAN_MOE_FAILURES'])\n"
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


@pytest.mark.parametrize(
    "signals", [[("SIGTERM", 0)], [("SIGUSR1", 0)], [("SIGUSR1", 0), ("SIGTERM", 0.1)] * 2]
)
def test_a_request_ends_a_run_with_75_once_it_is_saved(
    signals: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITAN_MOE_STOPPED", str(tmp_path / "marked"))
    script = _ASKS.format(signals=signals, code=0)
    assert start(monkeypatch, tmp_path, script, stop_timeout_s=30) == 75
    assert (tmp_path / "marked").exists()


@pytest.mark.parametrize(("stop_timeout_s", "code"), [(30, 75), (None, 143)])
def test_a_request_while_the_configuration_is_checked_waits_for_torchrun(
    stop_timeout_s: int | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As run_train.sh starts the command, and its own way from there to torchrun."""
    saves = stop_timeout_s is not None
    job = JobConfig(
        job=Job(dump_folder=str(tmp_path)),
        checkpoint=Checkpoint(enable=saves),
        training=Training(stop_timeout_seconds=stop_timeout_s or 1),
    )

    def check(*all: object) -> tuple[JobConfig, list[str]]:
        signal.raise_signal(signal.SIGUSR1)  # To this thread: earlier tests have left others.
        return job, []

    def starts(words: Sequence[str], **settings: Any) -> int:
        assert settings["stop_timeout_s"] == stop_timeout_s
        assert not settings["has_saved"]()
        (tmp_path / "checkpoint" / "step-2").mkdir(parents=True)
        assert settings["has_saved"]()
        script = _ASKS.format(signals=[], code=0)
        return start(monkeypatch, tmp_path, script, stop_timeout_s=stop_timeout_s)

    monkeypatch.setattr("titan_moe.train.check_all", check)
    monkeypatch.setattr(torchrun, "start_ranks", starts)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    options = {"one_process": False, "nodes": 1, "node_rank": 0, "endpoint": "", "max_restarts": 0}
    try:
        asked = COMMAND.run(Namespace(**options, ranks=1, config=None, overrides=[]))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        signal.signal(signal.SIGUSR1, before)
    assert asked.exit_code == code


def test_on_a_terminal_a_stop_is_said_below_the_progress_bar(tmp_path: Path) -> None:
    torchrun = (
        "import os, signal, time\nprint('step 3/9', end='', flush=True)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(0.3)"
    )
    launcher = (
        "import os, sys\nfrom pathlib import Path\nfrom titan_moe.runtime.child import Child\n"
        f"folder = Path({str(tmp_path)!r})\n"
        f"Child(folder, 30).run([sys.executable, '-c', {torchrun!r}], folder / 'log', os.environ)"
    )
    code, seen = on_terminal([sys.executable, "-c", launcher], os.environ)
    assert code == 0 and seen.startswith("step 3/9\r\nasked to stop: "), seen


def test_a_rank_that_crashes_leaves_its_python_stack_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch, tmp_path, "import os\ndef crashes():\n    os.abort()\ncrashes()")
    (log,) = (tmp_path / "launch").iterdir()
    assert "in crashes" in log.read_text()


def test_a_run_that_fails_as_it_saves_is_not_75(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = _ASKS.format(signals=[("SIGTERM", 0)], code=1)
    assert start(monkeypatch, tmp_path, script, stop_timeout_s=30) == 1
    assert "ended without naming a rank" in capsys.readouterr().err


def test_an_answer_of_an_earlier_attempt_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = _ASKS.format(signals=[("SIGTERM", 0)], code="(records / 'attempt-10').mkdir()")
    assert start(monkeypatch, tmp_path, script, stop_timeout_s=30) == 0


@pytest.mark.parametrize(
    ("signals", "timeout_s", "seconds", "code"),
    [
        ([("SIGTERM", 1.2), ("SIGTERM", 0)], 30, 1.2, 143),  # The second one.
        ([("SIGTERM", 0)], 1, 1, 143),
        ([("SIGTERM", 0)], None, 0, 143),
        ([("SIGUSR1", 0)], None, 0, 143),
        ([("SIGHUP", 0)], 30, 0, 143),
        ([("SIGINT", 0)], 30, 0, 130),
    ],
)
def test_a_run_that_cannot_or_must_not_save_ends_at_once(
    signals: list,
    timeout_s: int | None,
    seconds: float,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = _ASKS.format(signals=signals, code="time.sleep(60)")
    (tmp_path / "config.toml").touch()
    began = time.monotonic()
    assert start(monkeypatch, tmp_path, script, stop_timeout_s=timeout_s) == code
    assert seconds <= time.monotonic() - began < seconds + 20
    words = capsys.readouterr().out
    assert ("run_train.sh" in words) == (timeout_s is not None)


@pytest.mark.parametrize(
    ("has_saved", "lost"),
    [(True, "the steps since the last save are lost"), (False, "all steps are lost")],
)
def test_a_run_is_said_to_go_on_only_from_what_is_there(
    has_saved: bool,
    lost: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.toml").touch()
    script = _ASKS.format(signals=[("SIGHUP", 0)], code=0)
    start(monkeypatch, tmp_path, script, stop_timeout_s=30, has_saved=has_saved)
    (said,) = re.findall("^interrupted; .*$", capsys.readouterr().out, re.MULTILINE)
    assert said.startswith(
        f"interrupted; {lost} (one SIGTERM asks to save first); the same command"
    )
    assert ("goes on from there, and so does" in said) == has_saved
    assert ("begins again, and so does" in said) != has_saved


def test_without_checkpoints_an_interrupted_run_says_that_all_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start(monkeypatch, tmp_path, _ASKS.format(signals=[("SIGINT", 0)], code=0))
    words = "interrupted, all steps lost: SIGTERM saves with checkpoint.enable and no load_only"
    assert words in capsys.readouterr().out.splitlines()


def test_a_run_under_nohup_outlives_its_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hangs_up = "import signal, time; os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.3)"
    assert start(monkeypatch, tmp_path, f"import os; {hangs_up}", stop_timeout_s=30) == 0


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot write to job\.dump_folder=.*: Not a directory"):
        start(monkeypatch, tmp_path / "file" / "outputs", "")
