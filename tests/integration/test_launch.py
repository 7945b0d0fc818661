"""run_train.sh: ranks, nodes, signals, dead ranks."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import EMPTY, Job, command, environment, run_among, run_to_end, until
from tests.support.paths import REPO
from tests.support.processes import start_process
from tests.support.tiers import tiered
from titan_moe.metrics.jsonl import read_json_lines
from titan_moe.runtime.process_pool import TIMEOUT_S

_ENDLESS = 100_000


@pytest.mark.slow
def test_torchrun_trains_as_torchtitan_users_type_it(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    _, *keys = command(tmp_path / "run")
    words = [*torchrun, "-m", "titan_moe.train", "--job.config_file", EMPTY, *keys]
    done = run_to_end(*words, PYTHONPATH=REPO)
    assert done.returncode == 0, done.stderr
    assert _steps(tmp_path / "run") == [1, 2]


def test_dry_run_counts_ranks_of_two_nodes_and_writes_nothing(tmp_path: Path) -> None:
    keys = {"training__local_batch_size": 1, "checkpoint__enable": True}
    words = [*command(tmp_path / "run", **keys), "--dry-run", "0", "7"]
    done = run_to_end(*words, NGPU=4, NNODES=2)
    assert done.returncode == 0, done.stderr
    assert "\nrank 0 of 8 ranks (dp_shard=8" in f"\n{done.stdout}"
    assert "\nrank 7 of 8 ranks (dp_shard=8" in done.stdout
    assert "metrics.jsonl" in done.stdout and not (tmp_path / "run").exists()
    done = run_to_end(*words[:-1], "8", NGPU=4, NNODES=2)
    assert done.returncode == 2 and "rank 8: there are 8 ranks" in done.stderr


def test_signal_before_python_can_answer_it_ends_nothing(tmp_path: Path) -> None:
    python = (
        'case $1 in -c) echo "$0" ;; *has_dependencies.py) kill -USR1 $PPID ;;'
        " -m) kill -USR1 $$; kill -INT $$; exit 7 ;; esac"
    )
    assert run_among({"python3": python}, tmp_path, REPO / "run_train.sh").returncode == 7


def test_python_reads_run_train_and_says_what_to_type() -> None:
    """torchrun without --no-python starts each rank so."""
    done = subprocess.run([sys.executable, REPO / "run_train.sh"], capture_output=True, text=True)
    assert done.returncode == 1 and "type ./run_train.sh, torchrun --no-python" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_slurm_starts_run_train_once_per_node(tmp_path: Path) -> None:
    """Slurm's commands are stand-ins: srun runs its command once for each of two nodes."""
    programs = {
        "srun": '[[ "$1 $2" == "--nodes=2 --ntasks=2" ]] || exit 1; '
        'while [[ $1 == --* ]]; do echo "$1" >> options; shift; done; '
        'for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@"; done',
        "run_train.sh": 'echo "$NNODES $NODE_RANK $RDZV_ENDPOINT $*"',
    }
    started = _slurm(tmp_path, programs, "--training.steps", "3")
    lines = [f"2 {node} node7:29500 --training.steps 3" for node in range(2)]
    assert started.stdout.splitlines() == lines, started.stderr
    assert started.returncode == 0
    options = (tmp_path / "options").read_text().split()
    assert {"--cpus-per-task=104", "--gpus-per-node=h100:4", "--cpu-bind=none"} <= set(options)


@pytest.mark.parametrize(
    ("run_train", "code", "requeued"),
    [
        ('touch "$TITAN_MOE_STOPPED"; exit 75', 75, True),
        ('touch "$TITAN_MOE_STOPPED"; exit 137', 75, True),  # Ended by srun once the first had.
        ("exit 75", 75, False),
        ("exit 1", 1, False),
    ],
)
def test_slurm_requeues_a_run_that_stopped_saved(
    tmp_path: Path, run_train: str, code: int, requeued: bool
) -> None:
    programs = {
        "srun": 'while [[ $1 == --* ]]; do shift; done; SLURM_PROCID=0 "$@"',
        "run_train.sh": run_train,
    }
    (tmp_path / "slurm-99.stopped").touch()  # A file of this job from before it was queued again.
    ended = _slurm(tmp_path, programs)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.splitlines() == ["requeue 99"] * requeued
    assert not list(tmp_path.glob("*.stopped"))


def test_slurm_passes_a_signal_on_to_every_node(tmp_path: Path) -> None:
    programs = {
        "srun": "trap 'exit 143' TERM; kill $PPID; sleep 5 & wait; exit 7",
        "run_train.sh": "",
    }
    ended = _slurm(tmp_path, programs)
    assert ended.returncode == 143, ended.stderr


_ARGUMENTS = "-m titan_moe train --max-restarts 0 --config c.toml"
_TRAINJOB = {"NNODES": 2, "NODE_RANK": 1, "MASTER_ADDR": "job-node-0-0.job", "MASTER_PORT": 29400}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "--nodes 1 --node-rank 0 --endpoint "),
        (
            {f"PET_{name}": value for name, value in _TRAINJOB.items()},
            "--nodes 2 --node-rank 1 --endpoint job-node-0-0.job:29400",
        ),
        (
            {"PET_NNODES": 2, "PET_NPROC_PER_NODE": 4, "PET_RDZV_ENDPOINT": "host:1", "RANK": 7},
            "--ranks 8 --nodes 2 --node-rank 0 --endpoint host:1",
        ),
        (_TRAINJOB, "--nodes 2 --node-rank 1 --endpoint job-node-0-0.job:29400"),
        (
            {"PET_NNODES": 2, "PET_MASTER_ADDR": "a", "NNODES": 1, "PET_NPROC_PER_NODE": "auto"},
            "--nodes 1 --node-rank 0 --endpoint a:29500",
        ),
        ({"PET_NNODES": "1:2"}, "error: NNODES=1:2 must be a whole number"),
    ],
)
def test_nodes_come_from_the_variables_of_each_launcher(
    tmp_path: Path, variables: dict[str, Any], words: str
) -> None:
    ended = _with_echo(tmp_path, "run_train.sh", CONFIG_FILE="c.toml", **variables)
    assert f"{_ARGUMENTS} {words}" == ended.stdout.strip("\n") or words == ended.stderr.strip()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "-m titan_moe verify suite FILE"),
        ({"SLURM_JOB_NUM_NODES": 2, "SLURM_PROCID": 0}, "-m titan_moe verify suite FILE"),
        (
            {"PET_NNODES": 2, "PET_MASTER_ADDR": "a"},
            "scripts/every_node.py PYTHON -m titan_moe verify suite FILE",
        ),
        ({"PET_NNODES": 2}, "needs NODE_RANK from 0 to 1, not 0, and RDZV_ENDPOINT=HOST:PORT"),
        ({"NNODES": 2, "NODE_RANK": 2, "MASTER_ADDR": "a"}, "needs NODE_RANK from 0 to 1, not 2"),
        ({"SLURM_JOB_NUM_NODES": 2, "SLURM_PROCID": 1}, "by sbatch, or once in an allocation"),
    ],
)
def test_regression_suite_starts_once_or_on_all_nodes(
    tmp_path: Path, variables: dict[str, Any], words: str
) -> None:
    ended = _with_echo(tmp_path, "scripts/regression.sh", "suite", "FILE", **variables)
    assert words == ended.stdout.strip() or words in ended.stderr


def test_regression_suite_submitted_to_slurm_is_found_where_it_was_submitted(
    tmp_path: Path,
) -> None:
    copy = shutil.copy(REPO / "scripts" / "regression.sh", tmp_path / "slurm_script")
    variables = {"SLURM_SUBMIT_DIR": REPO, "SLURM_JOB_NUM_NODES": 2}
    ended = _with_echo(tmp_path, copy, "suite", "FILE", **variables)
    assert ended.stdout == "-m titan_moe verify suite FILE\n", ended.stderr


def _with_echo(
    folder: Path, script: str, *words: str, **variables: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a script in whose place of Python a program prints its arguments."""
    python = '[[ $1 == -c ]] && echo "$0" && exit; '
    python += '[[ $1 == *has_dependencies.py ]] || echo "${@//"$0"/PYTHON}"'
    return run_among({"python3": python}, folder, REPO / script, *words, NGPU="", **variables)


def _slurm(folder: Path, programs: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    scontrol = 'if [[ $1 == show ]]; then printf "%s\\n" node7 node8; else echo "$@"; fi'
    slurm = {
        "SLURM_SUBMIT_DIR": folder,
        "SLURM_JOB_ID": 99,
        "SLURM_JOB_NUM_NODES": 2,
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_CPUS_ON_NODE": 104,
        "SLURM_GPUS_PER_NODE": "h100:4",
    }
    script = REPO / "scripts" / "slurm_train.sh"
    return run_among(programs | {"scontrol": scontrol}, folder, script, *words, **slurm)


def test_run_goes_on_when_the_reader_of_its_output_leaves(tmp_path: Path) -> None:
    words = command(tmp_path / "run", training__steps=20)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with start_process(words, env=environment(NGPU=1), **options) as run:
        assert run.stdout is not None
        assert run.stdout.readline().startswith(b"starting 1 rank(s)")
        run.stdout.close()
    assert run.returncode == 0 and _steps(tmp_path / "run")[-1] == 20


def test_tests_of_another_torch_run_in_an_environment_of_their_own(tmp_path: Path) -> None:
    """Python is a stand-in that notes how it is called, and finds no dependencies."""
    (tmp_path / "scripts").mkdir()
    for name in ("environment.sh", "test_torch.sh"):
        shutil.copy(REPO / "scripts" / name, tmp_path / "scripts")
    python = (
        f'echo "$0 $@" >> {tmp_path}/calls\n'
        'case "$1 $2" in "-c import sys; print"*) echo "$0" ;;'
        ' "-m venv") install -D "$0" "$3/bin/python" ;; esac\n'
        "[[ $1 != *has_dependencies.py ]]"
    )
    words = tmp_path / "scripts" / "test_torch.sh", "2.11.0", "-k", "router"
    assert run_among({"python3": python}, tmp_path, *words, TEST_PROCESSES=3).returncode == 0
    python = tmp_path / ".venv-torch-2.11.0" / "bin" / "python"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert f"{python} -m pip install --editable {tmp_path}[dev] torch==2.11.0" in calls
    assert calls[-1] == f"{python} -m pytest --tier default -n 3 --dist loadfile -k router"


@pytest.mark.parametrize(
    ("requirements", "installed"),
    [
        (["pydantic>=2", "no-such-package; python_version < '3'"], True),
        (["pydantic<2"], False),
        (["no-such-package"], False),
    ],
)
def test_has_dependencies_needs_all_requirements(
    tmp_path: Path, requirements: list[str], installed: bool
) -> None:
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(REPO / "scripts" / "has_dependencies.py", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text(
        f"[project]\ndependencies = []\n[project.optional-dependencies]\ndev = {requirements}\n"
    )
    assert subprocess.run([sys.executable, script, "dev"]).returncode == (not installed)
    assert subprocess.run([sys.executable, script]).returncode == 0


@pytest.mark.parametrize(
    ("number", "to_the_terminal", "code"),
    tiered(
        [(signal.SIGINT, True, 130)],
        slow=[(signal.SIGINT, False, 130), (signal.SIGTERM, False, 143)],
    ),
)
def test_signal_ends_all_ranks_and_names_the_folder(
    tmp_path: Path, number: signal.Signals, to_the_terminal: bool, code: int
) -> None:
    job = _start_endless(tmp_path)
    found = _listening(job.pids("job"))
    assert found and found <= _LOOPBACK, found
    (os.killpg if to_the_terminal else os.kill)(job.pid, number)
    assert job.wait() == code
    assert job.output().splitlines()[-1] == f"the files of this run are in {tmp_path / 'run'}"
    assert not job.pids("job")


# 127.0.0.1, the same as an IPv6 address, and ::1, in the form of /proc/net/tcp and tcp6.
_LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def _listening(pids: list[int]) -> set[str]:
    """The address of every TCP socket on which one of these processes listens."""
    handles = [handle for pid in pids for handle in Path(f"/proc/{pid}/fd").iterdir()]
    sockets = {os.readlink(handle) for handle in handles if handle.is_socket()}
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    listens = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return {row[1].partition(":")[0] for row in listens}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_a_job_saves_and_another_number_of_ranks_resumes(
    tmp_path: Path, number: signal.Signals
) -> None:
    job, run = _start_endless(tmp_path, checkpoint__enable="true"), tmp_path / "run"
    os.killpg(job.pid, number)
    assert job.wait() == 75, job.output()
    assert not job.pids("job")
    (saved,) = (run / "checkpoint").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert f"train --config {run}/config.toml" in job.output()
    words = REPO / "run_train.sh", "--training.steps", step + 2
    more = run_to_end(*words, CONFIG_FILE=run / "config.toml")
    assert more.returncode == 0, more.stderr
    assert f"going on after step {step}" in more.stdout
    assert _steps(run) == list(range(1, step + 3))


@pytest.mark.slow
def test_signal_to_one_node_stops_all_at_the_same_step(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        endpoint = f"localhost:{probe.getsockname()[1]}"
    nodes = [
        Job(
            tmp_path / str(node),
            command(tmp_path / "run", training__steps=_ENDLESS, checkpoint__enable="true"),
            environment(NNODES=2, NODE_RANK=node, RDZV_ENDPOINT=endpoint),
        )
        for node in range(2)
    ]
    _wait_for(nodes[0], tmp_path / "run" / "metrics.jsonl")
    os.kill(nodes[1].pid, signal.SIGUSR1)
    assert [node.wait() for node in nodes] == [75, 75], [node.output() for node in nodes]
    assert len(list((tmp_path / "run" / "checkpoint").iterdir())) == 1


@pytest.mark.slow
def test_killed_rank_costs_a_restart_and_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    keys = {"enable": "true", "interval": 2, "keep_latest_k": 2}
    overrides = {f"checkpoint__{key}": value for key, value in keys.items()}
    job, run = _start_endless(tmp_path, MAX_RESTARTS=1, **overrides), tmp_path / "run"
    for attempt in range(2):
        _wait_for(job, run / f"checkpoint/step-{2 + 4 * attempt}")
        assert job.kill("rank", 1)
    assert job.wait(30) == 137, job.output()
    lines = job.output().splitlines()
    assert lines[-1].startswith("error: rank 1 was killed by SIGKILL")
    assert job.output().count("going on after step") == 1 and not job.pids("job")
    steps = _steps(run)
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 6


@pytest.mark.slow
def test_stopped_rank_is_named_and_ends_the_run(tmp_path: Path) -> None:
    job, run = _start_endless(tmp_path, comm__train_timeout_seconds=3), tmp_path / "run"
    until(lambda: len(_steps(run)) > 1, TIMEOUT_S)  # The first may take as long as a start.
    rank_1 = job.pids("rank")[1]
    os.kill(rank_1, signal.SIGSTOP)
    until(lambda: any(run.glob("comm_traces/hang-*.json")), TIMEOUT_S)
    os.kill(rank_1, signal.SIGCONT)  # torchrun would wait half a minute to end it.
    assert job.wait() == 1
    first, second = job.output().splitlines()[-2:]
    assert first.startswith("error: step ") and "(docs/troubleshooting.md#hang" in first
    assert "; rank 1 does not answer (stopped, killed, or Python is held)" in first
    assert second.startswith("error: every rank's calls and stacks: titan-moe report hang ")
    assert not job.pids("job")


def _start_endless(folder: Path, **keys: Any) -> Job:
    """Starts two ranks in `folder`/run, and waits for their first step.

    Keys in capitals are variables of run_train.sh, others override the configuration.
    """
    variables = {name: value for name, value in keys.items() if name.isupper()}
    overrides = {name: value for name, value in keys.items() if name not in variables}
    words = command(folder / "run", training__steps=_ENDLESS, **overrides)
    job = Job(folder, words, environment(NGPU=2, **variables))
    _wait_for(job, folder / "run" / "metrics.jsonl")
    return job


def _wait_for(job: Job, path: Path) -> None:
    until(lambda: (path.exists() and path.stat().st_size > 0) or job.poll() is not None, TIMEOUT_S)
    assert path.exists() and job.poll() is None, job.output()


def _steps(folder: Path) -> list[int]:
    return [line["step"] for line in read_json_lines(folder / "metrics.jsonl")]
