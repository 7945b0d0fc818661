"""A process's place in the run, its machine's devices, and how it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import is_running, until
from tests.support.paths import REPO
from tests.support.processes import start_process
from tests.support.refusals import refusal
from titan_moe.prepare.job import prepare
from titan_moe.runtime.launch import Launch, count_gpus, cpu_threads, has_bfloat16_units


def test_launch_is_read_from_torchruns_variables() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    launch = Launch.from_environment(torchrun)
    assert launch == Launch(5, 8, 1, 4) and launch.num_nodes == 2
    pod = {"RANK": "1", "WORLD_SIZE": "2"}  # Some operators of Kubernetes set these.
    for environment in ({}, pod):
        assert Launch.from_environment(environment) == Launch(0, 1, 0, 1)


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 3), ("0,2", 2), ("", 0), ("-1", 0), ("0,1,2,3,4", 3)]
)
def test_gpus_are_counted_as_cuda_sees_them(
    tmp_path: Path, visible: str | None, expected: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environment, tmp_path) == expected


def test_count_gpus_asks_the_driver_without_device_files(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\necho 'GPU 1: the same'\n")
    tool.chmod(0o755)
    found = [count_gpus({"PATH": path}, tmp_path / "dev") for path in (str(tmp_path), "/nowhere")]
    assert found == [2, 0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("flags : avx2 avx512f", False),
        ("flags : avx2 avx512_bf16", True),
        ("Features : asimd bf16", True),
        ("Features : asimd", False),
        ("processor : 0", True),
    ],
)
def test_bfloat16_units_are_read_from_cpuinfo(words: str, expected: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert has_bfloat16_units(cpuinfo), "no such file"
    cpuinfo.write_text(words)
    assert has_bfloat16_units(cpuinfo) is expected


@pytest.mark.parametrize(
    ("units", "num_gpus", "arguments", "expected"),
    [
        (False, 0, [], "float32"),
        (True, 0, [], "bfloat16"),
        (False, 8, [], "bfloat16"),
        (False, 0, ["--training.mixed_precision_param", "bfloat16"], "bfloat16"),
    ],
)
def test_cpu_without_bfloat16_units_computes_in_float32(
    units: bool, num_gpus: int, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_moe.prepare.job.has_bfloat16_units", lambda: units)
    monkeypatch.setattr("titan_moe.prepare.job.count_gpus", lambda environment: num_gpus)
    config = str(REPO / "configs/qwen3/debugmodel_moe.toml")
    job, _, lines = prepare(["--job.config_file", config, *arguments], 1, {})
    assert job.training.mixed_precision_param == expected
    assert any("no bfloat16 units" in line for line in lines) is (expected == "float32")


def test_cpu_threads_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert cpu_threads(1) == cores
    assert cpu_threads(10 * cores) == 1


_RANK = (
    "import time\nfrom titan_moe.runtime.launch import end_with_parent\n"
    "end_with_parent()\nprint(flush=True)\ntime.sleep(60)"
)
_LAUNCHER_OF_RANK = (
    "import subprocess, sys\n"
    f"rank = subprocess.Popen([sys.executable, '-c', {_RANK!r}], stdout=subprocess.PIPE)\n"
    "rank.stdout.readline()\nprint(rank.pid, flush=True)\nrank.wait()"
)
_LAUNCHER_OF_TORCHRUN = (
    "import os, sys\nfrom pathlib import Path\n"
    "from titan_moe.runtime.torchrun import _Torchrun\n"
    "folder = Path(sys.argv[1])\n"
    "sleeps = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
    "command = [sys.executable, '-c', sleeps]\n"
    "_Torchrun(folder, None).run(command, folder / 'log', os.environ)"
)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize(
    "launcher", [_LAUNCHER_OF_RANK, _LAUNCHER_OF_TORCHRUN], ids=["rank_dies", "torchrun_dies"]
)
def test_processes_die_with_their_launcher(launcher: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", launcher, str(tmp_path)]
    with start_process(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    assert until(lambda: not is_running(pid), 5)


def test_log_rank_beyond_the_world_is_refused_in_one_line() -> None:
    words = ["--training.dataset", "synthetic"]
    line = refusal(prepare, words, 2, {"LOG_RANK": "9"})
    assert line == "LOG_RANK=9: none of the ranks 0 to 1 would print: choose 0"
    assert prepare(words, 2, {"LOG_RANK": "1,9"})
