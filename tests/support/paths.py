"""Paths of the repository, and a copy of its files."""

import os
import shutil
from pathlib import Path

from tests.support.processes import git

REPO = Path(__file__).parents[2]
DEBUG_CONFIGS = REPO / "configs" / "debug"


def copy_checkout(folder: Path) -> None:
    """Copies the files that git knows, as they are now."""
    listed = git(REPO, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(REPO / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name, follow_symlinks=False)
