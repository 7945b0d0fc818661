"""Tests run in a copy of the repository, in which a file may be changed.

A server in the copy has imported torch and forks once for each run, so that a run takes as long as
its tests do. As a program this file is that server.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_LIMIT_S = 240
"""Of one test; less than what ranks wait for one another, so that it is known as a limit."""
_RUN_LIMIT_S = 900.0
"""Of all tests of one run."""
_POLL_S = 0.05
_VARIABLES = ("PYTEST_", "TITAN_MOE_", "PYTHON")
"""Prefixes of those that would tell a test of the copy about this run."""


class Outcome(NamedTuple):
    """How a run of tests ended."""

    exit_code: int
    """pytest's; -1 of a run that was ended at its limit."""
    failed: list[str]
    """Names of the tests that failed."""
    late: list[str]
    """Those of them that ran into a time limit."""
    told: str
    """What pytest wrote."""

    def problem(self, *, waits: bool = False) -> str:
        """Why the run does not show that a test saw a mistake; "" when it does.

        Args:
            waits: the mistake is to wait without end.
        """
        seen = self.failed if waits else [name for name in self.failed if name not in self.late]
        if self.exit_code == pytest.ExitCode.TESTS_FAILED and seen:
            return ""
        why = {-1: f"not done after {_RUN_LIMIT_S:g} s", 0: "all of its tests pass"}
        why |= {1: "a test ran into its time limit" if self.late else "no test was run"}
        why |= {2: "a file of tests cannot be imported", 5: "there is no such test"}
        return why.get(self.exit_code, f"pytest ends with {self.exit_code}")


class Tree:
    """A copy of a repository's files, and the server in it.

    Args:
        source: a repository; its files that git knows are copied as they are now.
        folder: where the copy is made, and what a run tells.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        self.root, self._outcome = folder / "tree", folder / "outcome.json"
        self._told = folder / "told.txt"
        self._passes: set[str] = set()
        self._changes = 0
        listed = subprocess.run(
            ["git", "-C", source, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            capture_output=True,
            check=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if os.path.lexists(source / name):
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, self.root / name, follow_symlinks=False)
        kept = {name: v for name, v in os.environ.items() if not name.startswith(_VARIABLES)}
        more = {"PYTHONPATH": str(self.root), "CUDA_VISIBLE_DEVICES": ""}
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(self._outcome), str(self._told)],
            cwd=self.root,
            env=kept | more,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """Another text in a file of the copy."""
        path = self.root / file
        right, times = path.read_bytes(), path.stat()
        self._changes += 1
        # Bytecode belongs to a source by its size and its second: no two texts share one.
        second = int(times.st_mtime) - self._changes
        path.write_text(text, encoding="utf-8")
        os.utime(path, (second, second))
        try:
            yield
        finally:
            path.write_bytes(right)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def run(self, arguments: Sequence[str]) -> Outcome:
        """Tests up to the first that fails."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._outcome.write_text(json.dumps({"exit_code": -1, "failed": [], "late": []}))
        print(json.dumps(list(arguments)), file=self._server.stdin, flush=True)
        assert self._server.stdout.readline(), "the server of the tree has ended"
        told = self._told.read_text(encoding="utf-8", errors="replace")
        return Outcome(**json.loads(self._outcome.read_text()), told=told)

    def passes(self, test: str) -> bool:
        """Whether a test passes in the copy as it is; asked once of each."""
        arguments = [test, "--tier", "full"]  # Whatever its tier is.
        if test not in self._passes and self.run(arguments).exit_code == 0:
            self._passes.add(test)
        return test in self._passes

    def close(self) -> None:
        """Ends the server, and a run that has not ended."""
        self._server.terminate()
        self._server.communicate()


class _Failures:
    """A plugin of pytest: which tests failed, and which of them at a time limit."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.late: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.when == "call":
            self.failed.append(report.nodeid)
            if "Timeout (>" in report.longreprtext:
                self.late.append(report.nodeid)


def _serve(outcome: Path, told: Path) -> None:
    """One run for each line of stdin; a line of stdout when it has ended."""
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.utils.checkpoint  # noqa: F401

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        for line in sys.stdin:
            _run_and_wait(json.loads(line), outcome, told)
            print("done", flush=True)
    os._exit(0)  # torch's destructors take seconds.


def _run_and_wait(arguments: list[str], outcome: Path, told: Path) -> None:
    process = os.fork()
    if process == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        _run(arguments, outcome, told)
    deadline = time.monotonic() + _RUN_LIMIT_S
    try:
        while os.waitpid(process, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
            time.sleep(_POLL_S)
    finally:  # What the run has left behind, too.
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)


def _run(arguments: list[str], outcome: Path, told: Path) -> None:
    """In the forked process, which ends here."""
    file = os.open(told, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in ((null, 0), (file, 1), (file, 2)):
        os.dup2(number, descriptor)
    sys.path[0] = os.getcwd()  # Not this file's folder.
    failures = _Failures()
    options = ["-x", "-p", "no:cacheprovider", "--tier", "default", f"--timeout={_LIMIT_S}"]
    code = pytest.main([*options, *arguments], plugins=[failures])
    sys.stdout.flush()
    found = {"exit_code": int(code), "failed": failures.failed, "late": failures.late}
    outcome.write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Path(sys.argv[2]))
