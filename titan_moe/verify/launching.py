"""Run a side for real: run_train.sh of its own code, on its own number of ranks.

Each run has a folder; what finished there under the same code, configuration and ranks is taken as
it is, so that an interrupted comparison goes on where it was. On several Slurm nodes (inside an
allocation) a run is started by scripts/slurm_train.sh instead.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.verify.code_trees import CodeTree, code_tree
from titan_moe.verify.records import RunRecord, read_run
from titan_moe.verify.sides import Side, Words

_NOTE = "comparison_run.json"
_LAST_LINES = 12


class SideError(RuntimeError):
    """A run ended with an exit code other than 0; the message holds its last lines."""


@dataclass(frozen=True)
class Launcher:
    """Runs sides below one folder."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every run besides this process's own."""
    shared: Path | None = None
    """A folder in which runs are found again by what they follow from, whoever asks for them;
    None: each lies in a folder of its name."""

    def code(self, side: Side) -> CodeTree:
        """The code that a side runs."""
        return code_tree(side.revision, self.folder / "worktrees")

    def run(self, side: Side, name: str, *more: tuple[str, str]) -> RunRecord:
        """Train a side in the folder `name`, unless it has been done.

        Args:
            more: keys that outdo the side's own; those that its code does not know are left out.

        Raises SideError, or KeyboardInterrupt after the run has ended on the same signal.
        """
        record = read_run(self._ensure(side, name, more), name=name)
        return replace(record, facts={**record.facts, "told": self.code(side).told})

    def seed(self, side: Side, name: str, *more: tuple[str, str]) -> Path:
        """A side's initial weights as a checkpoint, in the folder `name`."""
        switches = ("checkpoint.enable", "true"), ("checkpoint.create_seed_checkpoint", "true")
        return self._ensure(side, name, (*more, *switches)) / "checkpoint" / "step-0"

    def _ensure(self, side: Side, name: str, more: Words) -> Path:
        code = self.code(side)
        arguments = side.arguments(*((key, value) for key, value in more if key in code.keys))
        mark = _mark(side, code, arguments, self.environment)
        folder = (self.folder / name if self.shared is None else self.shared / mark[:16]).resolve()
        if _finished(folder, mark):
            return folder
        _clear(folder)
        _note(folder, mark, seconds=None)
        started = time.perf_counter()
        self._train(side, code, folder, arguments)
        _note(folder, mark, seconds=round(time.perf_counter() - started, 2))
        return folder

    def _train(self, side: Side, code: CodeTree, folder: Path, arguments: list[str]) -> None:
        command, variables = _command(side, code.folder)
        words = [*command, *side.file(), *arguments, "--job.dump_folder", str(folder)]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = os.environ | {"PATH": path} | variables | dict(self.environment)
        environment.pop("PYTHONPATH", None)  # This process's own code is not the side's.
        with (folder / "console.log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                words, cwd=code.folder, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            try:
                exit_code = process.wait()
            except BaseException:  # An interrupt; a terminal's has reached the run already.
                process.terminate()
                process.wait()
                raise
        if exit_code:
            lines = (folder / "console.log").read_text(errors="replace").splitlines()
            shown = "\n".join(f"  | {line}" for line in lines[-_LAST_LINES:])
            raise SideError(
                f"{folder.name} of {code.told} ended with exit code {exit_code}; its last lines "
                f"({folder / 'console.log'}):\n{shown}"
            )


def _command(side: Side, folder: Path) -> tuple[list[str], dict[str, str]]:
    ranks = {} if side.ranks is None else {"NGPU": str(side.ranks)}
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    if nodes == 1:
        return [str(folder / "run_train.sh")], ranks
    per_node = int(os.environ.get("SLURM_GPUS_ON_NODE", "8"))
    variables = {"SLURM_SUBMIT_DIR": str(folder)}
    if side.ranks is not None:
        used = -(-side.ranks // per_node)
        variables |= {"NGPU": str(side.ranks // used), "NNODES": str(used)}
    return ["bash", str(folder / "scripts" / "slurm_train.sh")], variables


def _finished(folder: Path, mark: str) -> bool:
    """Whether that very run has ended there."""
    path = folder / _NOTE
    if not path.is_file():
        return False
    found = json.loads(path.read_text(encoding="utf-8"))
    return bool(found["mark"] == mark and found["seconds"] is not None)


def _clear(folder: Path) -> None:
    """Make the folder, anew if an earlier run of ours lies there; ConfigError if something else
    does."""
    if folder.exists():
        if not (folder / _NOTE).is_file() and any(folder.iterdir()):
            raise ConfigError(
                [f"{folder} holds files that are of no comparison: choose another --out"]
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _note(folder: Path, mark: str, *, seconds: float | None) -> None:
    """What the run follows from and, when it has ended, the seconds that it took."""
    found = {"mark": mark, "seconds": seconds}
    (folder / _NOTE).write_text(json.dumps(found), encoding="utf-8")


def _mark(side: Side, code: CodeTree, arguments: list[str], variables: Mapping[str, str]) -> str:
    """A hash of all that a run follows from."""
    config = "" if side.config is None else side.config.read_text(encoding="utf-8")
    versions = code.tree, version("torch")
    follows: list[Any] = [versions, config, arguments, side.ranks, sorted(variables.items())]
    return hashlib.sha256(json.dumps(follows).encode()).hexdigest()
