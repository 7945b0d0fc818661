"""Paths of the repository, and a copy of its files."""

import os
import shutil
import subprocess
from pathlib import Path

REPO = Path(__file__).parents[2]
DEBUG_CONFIGS = REPO / "configs" / "debug"


def copy_checkout(folder: Path) -> None:
    """Copies the files that git knows, as they are now."""
    listed = subprocess.run(
        ["git", "-C", REPO, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if os.path.lexists(REPO / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name, follow_symlinks=False)
