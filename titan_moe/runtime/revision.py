"""Which revision of the code is running."""

import subprocess
from pathlib import Path


def code_revision(folder: Path) -> dict[str, str | bool] | None:
    """The commit of the git repository that `folder` is in, and whether files differ from it; None
    outside a repository, and where there is no git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changed)}


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()
