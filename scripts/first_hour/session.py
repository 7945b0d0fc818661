"""Commands of one part of the first hour: started, timed, logged, and ended at the part's limit."""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from titan_moe.metrics.jsonl import read_json_lines

REPO = Path(__file__).resolve().parents[2]
_POLL_S = 0.2
_GRACE_S = 10
"""Seconds between the interrupt of a command and its end by force."""
_LAST_LINES = 20


def count_tests(file: Path) -> dict[str, Any]:
    """Returns how many tests of JUnit's file had which end, the names of those that failed, and
    what tests recorded."""
    ends = dict.fromkeys(("passed", "skipped", "failure", "error"), 0)
    failed, recorded = [], {}
    for case in xml.etree.ElementTree.parse(file).iter("testcase"):
        if case.get("name") is None:  # That ran when pytest was interrupted.
            continue
        end = next((child.tag for child in case if child.tag in ends), "passed")
        ends[end] += 1
        if end in ("failure", "error"):
            failed.append(str(case.get("name")))
        if values := {each.get("name"): each.get("value") for each in case.iter("property")}:
            recorded[case.get("name")] = values
    return {**ends, "failed": failed, "recorded": recorded}


class PartError(Exception):
    """Raised with the line that says what went wrong."""


class UnseenError(Exception):
    """Raised with the reason why this machine cannot show what a part is about."""


@dataclass(frozen=True)
class Machine:
    """The ranks that a part may use, and this node among all."""

    device: str
    """"cuda" or "cpu"."""
    ranks: int
    """Number of ranks on all nodes."""
    nodes: int = 1
    node: int = 0
    endpoint: str = ""

    @property
    def on_gpus(self) -> bool:
        return self.device == "cuda"

    @property
    def local_ranks(self) -> int:
        return self.ranks // self.nodes


@dataclass
class Session:
    """Runs the commands of one part.

    Args:
        folder: one for all nodes; gets whatever the commands write.
        limit_s: seconds that all commands of the part may take together.
        log: file that the output of all commands is added to.
    """

    machine: Machine
    folder: Path
    limit_s: float
    log: Path
    _began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.tests = self.folder / "tests.xml"
        """JUnit's file, of a part that runs tests."""
        self.figures = self.folder / "figures.json"
        """The figures that a benchmark writes anew after each row of its table."""
        self._start = self.log.stat().st_size if self.log.exists() else 0
        self._stopped_at: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def run(
        self, *words: object, accept: tuple[int, ...] = (0,), env: Mapping[str, str] | None = None
    ) -> str:
        """Runs a command in the repository's root and returns its output.

        Raises PartError with the last line of the output if the exit code is none of `accept`.
        """
        process, start = self.start(*words, env=env)
        code, output = self.wait(process), self.output(start)
        if code not in accept:
            last = output.strip().rpartition("\n")[2] or "no output"
            raise PartError(f"a command of {self.log.name} ended with {code}: {last}")
        return output

    def start(
        self, *words: object, env: Mapping[str, str] | None = None
    ) -> tuple[subprocess.Popen[bytes], int]:
        """Starts a command; returns it, and where its output begins in the log."""
        variables = {"PYTHONPATH": f"{REPO}:{os.environ.get('PYTHONPATH', '')}".strip(":")}
        if not self.machine.on_gpus:  # Of toy sizes, threads would only wait for each other.
            variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(map(str, words))}\n".encode())
            log.flush()
            start = log.tell()
            process = subprocess.Popen(
                [*map(str, words)],
                cwd=REPO,
                env={**os.environ, **variables, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # `wait` interrupts it. A shell's background job would hand down SIGINT ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self._process = process
        return process, start

    def output(self, start: int) -> str:
        """Returns the log from a byte on."""
        return self.log.read_bytes()[start:].decode(errors="replace")

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Waits for a command. Raises PartError at the limit, with the command stopped."""
        try:
            return process.wait(max(1.0, self._began + self.limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._stopped_at = self.log.stat().st_size
            self.end()
            raise PartError(f"stopped at the limit of {self.limit_s:.0f} s") from None

    def end(self) -> None:
        """Ends the command that runs, if one does: interrupted first, for pytest then writes what
        it has seen, and torchrun ends its ranks, which are in sessions of their own."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        os.killpg(process.pid, signal.SIGINT)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def evidence(self) -> dict[str, Any]:
        """Returns what the part had seen when it ended: the tests and figures in its folder, and
        the last lines of its log, before an interrupt."""
        found: dict[str, Any] = {}
        if self.tests.is_file():
            with suppress(xml.etree.ElementTree.ParseError):  # Ended while it was written.
                found["tests"] = count_tests(self.tests)
        if self.figures.is_file():
            found["figures"] = json.loads(self.figures.read_text(encoding="utf-8"))
        said = self.log.read_bytes()[self._start : self._stopped_at].decode(errors="replace")
        return found | {"log": said.splitlines()[-_LAST_LINES:]}

    def titan_moe(self, *words: object, accept: tuple[int, ...] = (0,)) -> str:
        """Runs a command of titan-moe."""
        return self.run(sys.executable, "-m", "titan_moe", *words, accept=accept)

    def train_words(self, name: str, config: str, keys: Mapping[str, object]) -> list[object]:
        """Returns the command that trains a configuration on all ranks, into `folder/name`."""
        machine = self.machine
        places = ["--ranks", machine.ranks, "--nodes", machine.nodes]
        if machine.nodes > 1:
            places += ["--node-rank", machine.node, "--endpoint", machine.endpoint]
        options = {"job.dump_folder": self.folder / name, "metrics.log_freq": 1, **keys}
        return [
            *(sys.executable, "-m", "titan_moe", "train", "--config", config, *places),
            *(f"--{key}={value}" for key, value in options.items()),
        ]

    def train(self, name: str, config: str, keys: Mapping[str, object]) -> list[dict[str, Any]]:
        """Trains, and returns the lines of metrics.jsonl."""
        self.run(*self.train_words(name, config, keys))
        return read_json_lines(self.folder / name / "metrics.jsonl")

    def rank_of(self, process: subprocess.Popen[bytes], rank: int, metrics: Path) -> psutil.Process:
        """Returns the process of a rank of a training, once three of its steps are logged."""
        while process.poll() is None and time.monotonic() < self._began + self.limit_s:
            if metrics.is_file() and len(read_json_lines(metrics)) >= 3:
                for child in psutil.Process(process.pid).children(recursive=True):
                    if child.environ().get("RANK") == str(rank):
                        return child
            time.sleep(_POLL_S)
        raise PartError("the training logged no three steps")
