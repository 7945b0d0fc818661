"""The code that a side runs: this working tree, or a clean worktree of a commit."""

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from titan_moe.config.errors import ConfigError

REPO = Path(__file__).parents[2]


@dataclass(frozen=True)
class CodeTree:
    """A folder of code and the hash of what is in it."""

    folder: Path
    tree: str
    """git's hash of the package, what is not committed included; "unversioned" outside a
    repository."""
    told: str
    """For a person: "main (1a2b3c4)", or "working tree (1a2b3c4, changed)"."""

    @property
    def keys(self) -> frozenset[str]:
        """Every key of its configuration, "table.key"; an older revision lacks some."""
        return _keys(self.folder)


def code_tree(revision: str, worktrees: Path) -> CodeTree:
    """The code of a revision, checked out below `worktrees` if it is not there yet; of "", this
    working tree as it stands. Raises ConfigError for what git does not know."""
    if not revision:
        return _working_tree()
    commit = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", ok=(0, 1, 128))
    if not commit:
        raise ConfigError([f"revision={revision}: git knows no such commit in {REPO}"])
    folder = worktrees / commit[:12]
    if not (folder / "run_train.sh").exists():
        worktrees.mkdir(parents=True, exist_ok=True)
        _git("worktree", "prune")
        _git("worktree", "add", "--force", "--detach", str(folder.resolve()), commit)
    if _git("status", "--porcelain", at=folder):
        raise ConfigError([f"{folder}: files were changed there: remove the folder, and run again"])
    return CodeTree(folder, _git("rev-parse", f"{commit}:titan_moe"), f"{revision} ({commit[:7]})")


def remove_worktrees(worktrees: Path) -> None:
    """Take away what `code_tree` has checked out."""
    for folder in sorted(worktrees.glob("*")):
        _git("worktree", "remove", "--force", str(folder.resolve()), ok=(0, 128))


@cache
def _working_tree() -> CodeTree:
    try:
        commit = _git("rev-parse", "HEAD")
    except (OSError, ConfigError):
        return CodeTree(REPO, "unversioned", "working tree (no git repository)")
    with tempfile.TemporaryDirectory() as folder:
        # An index of its own: the user's stays as it is.
        index = str(Path(folder) / "index")
        _git("read-tree", "HEAD", index=index)
        _git("add", "--all", index=index)
        tree = _git("write-tree", index=index)
    changed = "" if tree == _git("rev-parse", "HEAD^{tree}") else ", changed"
    package = _git("rev-parse", f"{tree}:titan_moe")
    return CodeTree(REPO, package, f"working tree ({commit[:7]}{changed})")


@cache
def _keys(folder: Path) -> frozenset[str]:
    schema = json.loads((folder / "configs" / "schema.json").read_text(encoding="utf-8"))
    tables = {
        name: definition.get("properties", {}) for name, definition in schema["$defs"].items()
    }
    return frozenset(
        f"{table}.{key}"
        for table, shape in schema["properties"].items()
        for key in tables[shape["$ref"].rpartition("/")[2]]
    )


def _git(*words: str, at: Path | None = None, ok: tuple[int, ...] = (0,), index: str = "") -> str:
    done = subprocess.run(
        ["git", "-C", str(at or REPO), *words],
        capture_output=True,
        text=True,
        env=os.environ | ({"GIT_INDEX_FILE": index} if index else {}),
    )
    if done.returncode not in ok:
        raise ConfigError([f"git {' '.join(words)}: {done.stderr.strip().splitlines()[-1]}"])
    return done.stdout.strip()
