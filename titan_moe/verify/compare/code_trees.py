"""The code of a run: this working tree, or a clean worktree of a commit."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.runtime.revision import CHECKOUT, code_in_words, code_revision, files_hash

REPO = CHECKOUT
WORKTREES = ".comparison_worktrees"
"""The folder of worktrees in the output folder; no user's file has this name."""
_RUNS = ("titan_moe/**/*.py", "scripts/*", "run_train.sh", "configs/schema.json")
_SHORT = 12


@dataclass(frozen=True)
class CodeTree:
    """A folder of code and the hash of what is in it."""

    folder: Path
    tree: str
    """A hash of the files that a run is made of, committed or not."""
    description: str
    """Name for a reader: "main (1a2b3c4)", or "working tree (1a2b3c4, changed)"."""

    def __str__(self) -> str:
        package = self.folder / "titan_moe"
        return f"{package}, {self.description} (sha256 {files_hash(package)[:12]})"

    def problem(self, ran: Mapping[str, Any]) -> str:
        """Says why a run that recorded `ran` (runtime.revision.running_code) ran other code than
        this; "" if it did not."""
        if ran.get("sha256") == files_hash(self.folder / "titan_moe"):
            return ""
        return f"it ran {code_in_words(ran)} instead of {self}"


def code_tree(revision: str, worktrees: Path) -> CodeTree:
    """Returns the code of a revision, checked out below `worktrees` if it is not there yet; for "",
    this working tree as it stands. Raises ConfigError for a revision that git does not know."""
    if not revision:
        if not (REPO / "run_train.sh").is_file():
            raise ConfigError(f"{REPO} is no checkout: trainings are started by its run_train.sh")
        head = "no git repository"
        if found := code_revision(REPO):
            head = f"{found['commit'][:7]}{', changed' * found['changed']}"
        return CodeTree(REPO, files_hash(REPO, _RUNS), f"working tree ({head})")
    commit = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", ok=(0, 1, 128))
    if not commit:
        raise ConfigError(f"revision={revision}: git knows no such commit in {REPO}")
    folder = (worktrees / commit[:_SHORT]).resolve()  # Runs have it as their working folder.
    if not folder.exists():
        worktrees.mkdir(parents=True, exist_ok=True)
        _git("worktree", "prune")
        _git("worktree", "add", "--force", "--detach", str(folder), commit)
    if _git("status", "--porcelain", at=folder) or _git("rev-parse", "HEAD", at=folder) != commit:
        raise ConfigError(f"{folder}: files were changed there: remove the folder, and run again")
    return CodeTree(folder, files_hash(folder, _RUNS), f"{revision} ({commit[:7]})")


def remove_worktrees(worktrees: Path) -> None:
    """Remove what `code_tree` has checked out, unless something was changed there."""
    for folder in sorted(worktrees.glob("[0-9a-f]" * _SHORT)):
        _git("worktree", "remove", str(folder.resolve()), ok=(0, 128))


def _git(*words: str, at: Path | None = None, ok: tuple[int, ...] = (0,)) -> str:
    command = ["git", "-C", str(at or REPO), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(f"git cannot be started: {error.strerror}") from None
    if done.returncode not in ok:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"git {' '.join(words)}: {reason}")
    return done.stdout.strip()
