"""Trains a RunSpec by run_train.sh of its code, on its number of ranks.

Each run has a folder. A run that finished there under the same code, configuration and ranks is
taken as it is, so that an interrupted comparison goes on where it was. On several Slurm nodes
(inside an allocation) scripts/slurm_train.sh starts the run instead; on other machines the command
of EVERY_NODE, which scripts/every_node.py sets, starts run_train.sh on each.
"""

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from os.path import expanduser
from pathlib import Path
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.config.parse import tomllib
from titan_moe.data.corpus import named_paths
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import lock_folder, write_whole
from titan_moe.runtime.launch import default_ranks
from titan_moe.runtime.revision import files_hash
from titan_moe.verify.compare.code_trees import WORKTREES, CodeTree, code_tree, remove_worktrees
from titan_moe.verify.compare.goldens import golden_key
from titan_moe.verify.compare.records import RunRecord, read_run
from titan_moe.verify.compare.run_spec import INPUT_KEYS, RunSpec

EVERY_NODE = "TITAN_MOE_EVERY_NODE"
"""The variable that names a command which runs its arguments on the first NNODES machines."""
_NOTE = "comparison_run.json"
_LAST_LINES = 12
_MOST_FILES = 10_000
_WRITTEN = ("--debug.routing_record",)
_VARIABLES = ("OMP_", "MKL_", "CUDA_", "TORCH", "NCCL_", "ATEN_", "CUBLAS_")
"""Environment variables that may change a run's bits begin so."""


class TrainingError(RunError):
    """A run ended with an exit code other than 0, the message holds its last lines; or it was not
    the run that was asked for."""


@dataclass(frozen=True)
class Place:
    """A training and its folder, which need not exist yet."""

    spec: RunSpec
    name: str
    """Its name in a comparison: "baseline", "control/03", ..."""
    folder: Path
    mark: str
    """Hash of everything that determines the run."""
    arguments: list[str]
    """Command line, without the file."""
    seconds: float | None
    """Duration of the run, start-up included; None if it has not finished there."""


@dataclass(frozen=True)
class Launcher:
    """Trains below one folder."""

    folder: Path
    shared: Path | None = None
    """A folder in which runs are found again by their marks, also by another comparison; None: each
    lies in a folder of its name."""
    _seen: dict[str, str] = field(default_factory=dict)
    """The hash of each revision's code when it was first asked for."""

    def code(self, spec: RunSpec) -> CodeTree:
        """Returns a run's code. Raises TrainingError if it has changed since the first call."""
        code = code_tree(spec.revision, self.folder / WORKTREES)
        if self._seen.setdefault(spec.revision, code.tree) != code.tree:
            raise TrainingError(
                f"the code of the {code.description} was changed meanwhile: run again"
            )
        return code

    def place(self, spec: RunSpec, name: str, *more: tuple[str, str], fresh: bool = False) -> Place:
        """Returns where a run trains or has trained, and starts nothing.

        Args:
            more: keys that override the run's own.
            fresh: train in any case, in a folder that no other comparison shares.
        """
        code = self.code(spec)
        arguments = spec.arguments(*more)
        shared = None if fresh else self.shared
        pairs = zip(arguments[::2], arguments[1::2], strict=True)
        paths = [Path(value) for key, value in pairs if os.sep in value and key not in _WRITTEN]
        # A folder keeps its name when the runs that it reads have trained: theirs hold their marks.
        made = [path for path in paths if shared and path.is_relative_to(shared.resolve())]
        mark = _mark(spec, code, arguments, [path for path in paths if path not in made])
        # A candidate of the baseline's own code and keys would be compared with itself.
        own = "candidate-" * name.endswith("candidate") + mark[:16]
        folder = self.folder / name if shared is None else shared / own
        mark = _hash([mark, *map(_content, made)])
        seconds = None if fresh else _seconds(folder, mark)
        return Place(spec, name, folder.resolve(), mark, arguments, seconds)

    def read(self, place: Place) -> RunRecord:
        """Reads a finished run. Raises TrainingError for one that is not what was asked for."""
        name, spec = place.name, place.spec
        record = read_run(place.folder, name=name)
        if (ranks := record.facts["world_size"]) != spec.world_size:
            raise TrainingError(f"{name} ran on {ranks} ranks instead of {spec.world_size}")
        code = self.code(spec)
        if problem := code.problem(record.facts["code"]):
            raise TrainingError(f"{name} is not what was asked for: {problem}")
        return replace(record, facts={**record.facts, "told": code.description})

    def train(self, place: Place) -> None:
        """Trains. Raises TrainingError, or KeyboardInterrupt after the run has ended on the same
        signal."""
        _clear(place.folder)
        _note(place, seconds=None)
        started = time.perf_counter()
        self._train(place)
        self.code(place.spec)
        _note(place, seconds=time.perf_counter() - started)

    def _train(self, place: Place) -> None:
        spec, code, folder = place.spec, self.code(place.spec), place.folder
        command, variables = _command(spec, code.folder)
        # What a run writes lies in its own folder, unless it is named elsewhere.
        pairs = zip(place.arguments[::2], place.arguments[1::2], strict=True)
        placed = [w for k, v in pairs for w in (k, str(folder / v) if k in _WRITTEN else v)]
        words = [*command, *spec.file(), *placed, "--job.dump_folder", str(folder)]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = os.environ | {"PATH": path} | variables
        # For plug-ins; run_train.sh puts its own code before it.
        paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(each).absolute()) for each in paths)
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
            raise TrainingError(
                f"{folder.name} of {code.description} ended with exit code {exit_code}; its last "
                f"lines ({folder / 'console.log'}):\n{shown}"
            )


def num_nodes() -> int:
    """Machines that a training may use: those of scripts/every_node.py, or of the allocation."""
    variable = "NNODES" if EVERY_NODE in os.environ else "SLURM_JOB_NUM_NODES"
    return int(os.environ.get(variable, "1"))


@contextmanager
def workplace(folder: Path) -> Iterator[None]:
    """Lock an output folder; afterwards no worktree is left in it.

    Raises RunError if another command has locked it.
    """
    with lock_folder(folder, "--out"):
        try:
            yield
        finally:
            for worktrees in (folder / WORKTREES, *folder.glob(f"*/{WORKTREES}")):
                remove_worktrees(worktrees)


def _command(spec: RunSpec, folder: Path) -> tuple[list[str], dict[str, str]]:
    every_node = shlex.split(os.environ.get(EVERY_NODE, ""))
    run_train = str(folder / "run_train.sh")
    if not every_node and os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1":
        return [run_train], {"NGPU": str(spec.world_size), "NNODES": "1"}
    on_node = os.environ.get("NGPU") or os.environ.get("SLURM_GPUS_ON_NODE")
    used = -(-spec.world_size // int(on_node or default_ranks(os.environ)))
    ranks = {"NGPU": str(spec.world_size // used), "NNODES": str(used)}
    if every_node:
        return [*every_node, run_train], ranks
    script = str(folder / "scripts" / "slurm_train.sh")
    return ["bash", script], {"SLURM_SUBMIT_DIR": str(folder), **ranks}


def _seconds(folder: Path, mark: str) -> float | None:
    """Returns the duration of the run of this mark; None if it has not ended there."""
    path = folder / _NOTE
    note = json.loads(path.read_bytes()) if path.is_file() else {}
    return note["seconds"] if note.get("mark") == mark else None


def _clear(folder: Path) -> None:
    """Makes the folder, anew if an earlier run lies there; ConfigError if something else does."""
    if folder.exists():
        if not (folder / _NOTE).is_file() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder} holds files that are of no comparison: choose another --out"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _note(place: Place, *, seconds: float | None) -> None:
    """Writes the run's mark, and its duration if it has ended."""
    write_whole(place.folder / _NOTE, json.dumps({"mark": place.mark, "seconds": seconds}))


def _mark(spec: RunSpec, code: CodeTree, arguments: list[str], paths: list[Path]) -> str:
    """Hashes everything that determines a run. paths: files and folders among the arguments."""
    config = "" if spec.config is None else spec.config.read_text(encoding="utf-8-sig")
    # A CPU's name does not say how it rounds; a GPU's does, and a cluster gives another node.
    key = golden_key()
    machine = key, platform.node() if "-cpu-" in key else "", version("torch")
    named = {key: os.environ[key] for key in sorted(os.environ) if key.startswith(_VARIABLES)}
    follows: list[Any] = [
        *(code.tree, machine, config, arguments, spec.ranks, named),
        [_content(path) for path in paths],
        [_content(path) for path in _inputs(tomllib.loads(config), code.folder)],
        [hashed for name in spec.job().job.imports for hashed in _plug_in(name)],
    ]
    return _hash(follows)


def _hash(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _plug_in(name: str) -> Iterator[str]:
    """Hashes the package, or the file, of a module that this process has imported."""
    found = find_spec(name.partition(".")[0])
    assert found is not None, "reading the configuration imports it"
    if found.submodule_search_locations is None:
        yield files_hash(Path(str(found.origin)).parent, [Path(str(found.origin)).name])
    yield from (files_hash(Path(folder)) for folder in found.submodule_search_locations or ())


def _inputs(table: Any, folder: Path) -> Iterator[Path]:
    """The files and folders that a configuration names, data above all, from its code's folder."""
    for value in table if isinstance(table, list) else table.values():
        if isinstance(value, dict | list):
            yield from _inputs(value, folder)
    for key in INPUT_KEYS & table.keys() if isinstance(table, dict) else ():
        named = folder / Path(expanduser(str(table[key])))
        yield from named_paths(named) or [named]


def _content(path: Path) -> Any:
    """Names, sizes and times of a path's files; None where nothing is."""
    if not path.exists():
        return None
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return [
        (each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files[:_MOST_FILES]
    ]
