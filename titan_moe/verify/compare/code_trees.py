"""The code of a run: this working tree, or a clean worktree of a commit."""

import hashlib
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.runtime.revision import CHECKOUT, code_in_words, package_hash

REPO = CHECKOUT
WORKTREES = ".comparison_worktrees"
"""In the output folder; nothing of a user's has this name."""
_RUNS = ("titan_moe/**/*.py", "scripts/*", "run_train.sh", "configs/schema.json")
_SHORT = 12


@dataclass(frozen=True)
class CodeTree:
    """A folder of code and the hash of what is in it."""

    folder: Path
    tree: str
    """A hash of the files that a run is made of, committed or not."""
    description: str
    """For a person: "main (1a2b3c4)", or "working tree (1a2b3c4, changed)"."""
    commit: str = ""
    """Of a revision."""

    def __str__(self) -> str:
        package = self.folder / "titan_moe"
        return f"{package}, {self.description} (sha256 {package_hash(package)[:12]})"

    @property
    def keys(self) -> frozenset[str]:
        """Every key of its configuration, "table.key"; an older revision lacks some."""
        return _keys(self.folder)

    def has_another(self, file: Path) -> bool:
        """Whether this code has a file of the working tree's name, with other contents."""
        if not file.is_relative_to(REPO):
            return False
        own = self.folder / file.relative_to(REPO)
        return own.is_file() and own.read_bytes() != file.read_bytes()

    def problem(self, ran: Mapping[str, Any]) -> str:
        """Why a run that recorded `ran` (runtime.revision.running_code) ran other code than this;
        "" if it did not. A revision that records no hash yet is known by its commit."""
        package = self.folder / "titan_moe"
        if "sha256" in ran:
            same = ran["sha256"] == package_hash(package)
        else:
            same = self.commit == ran.get("commit", "") and not ran.get("changed")
        if same:
            return ""
        return f"it ran {code_in_words(ran)} instead of {self}"


def code_tree(revision: str, worktrees: Path) -> CodeTree:
    """The code of a revision, checked out below `worktrees` if it is not there yet; of "", this
    working tree as it stands. Raises ConfigError for what git does not know."""
    if not revision:
        if not (REPO / "run_train.sh").is_file():
            raise ConfigError([f"{REPO} is no checkout: trainings are started by its run_train.sh"])
        return CodeTree(REPO, _hash(REPO), f"working tree ({_head()})")
    commit = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", ok=(0, 1, 128))
    if not commit:
        raise ConfigError([f"revision={revision}: git knows no such commit in {REPO}"])
    folder = (worktrees / commit[:_SHORT]).resolve()  # Runs have it as their working folder.
    if not folder.exists():
        worktrees.mkdir(parents=True, exist_ok=True)
        _git("worktree", "prune")
        _git("worktree", "add", "--force", "--detach", str(folder), commit)
    if _git("status", "--porcelain", at=folder) or _git("rev-parse", "HEAD", at=folder) != commit:
        raise ConfigError([f"{folder}: files were changed there: remove the folder, and run again"])
    if not (folder / "configs" / "schema.json").is_file():
        raise ConfigError([f"revision={revision} is older than run_train.sh and its schema"])
    return CodeTree(folder, _hash(folder), f"{revision} ({commit[:7]})", commit)


def remove_worktrees(worktrees: Path) -> None:
    """Remove what `code_tree` has checked out, unless something was changed there."""
    for folder in sorted(worktrees.glob("[0-9a-f]" * _SHORT)):
        _git("worktree", "remove", str(folder.resolve()), ok=(0, 128))


def _head() -> str:
    try:
        changed = ", changed" if _git("status", "--porcelain") else ""
        return _git("rev-parse", "--short", "HEAD") + changed
    except ConfigError:
        return "no git repository"


def _hash(folder: Path) -> str:
    found = hashlib.sha256()
    for pattern in _RUNS:
        for path in sorted(folder.glob(pattern)):
            if path.is_file():
                found.update(f"{path.relative_to(folder)}\0".encode())
                found.update(path.read_bytes())
    return found.hexdigest()


@cache
def _keys(folder: Path) -> frozenset[str]:
    schema = json.loads((folder / "configs" / "schema.json").read_text(encoding="utf-8"))
    tables = {
        name: definition.get("properties", {}) for name, definition in schema["$defs"].items()
    }
    return frozenset(
        f"{table}.{key}"
        for table, shape in schema["properties"].items()
        if "$ref" in shape  # A list of tables, as [[stages]], is one key, which no table has.
        for key in tables[shape["$ref"].rpartition("/")[2]]
    )


def _git(*words: str, at: Path | None = None, ok: tuple[int, ...] = (0,)) -> str:
    command = ["git", "-C", str(at or REPO), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ConfigError([f"git cannot be started: {error.strerror}"]) from None
    if done.returncode not in ok:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError([f"git {' '.join(words)}: {reason}"])
    return done.stdout.strip()
