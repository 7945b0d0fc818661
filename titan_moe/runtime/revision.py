"""The running code: its folder, its commit, and a hash of its files."""

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder that titan_moe is imported from."""
CHECKOUT = PACKAGE.parent
"""The folder above, a checkout unless the package is installed."""


@cache
def running_code() -> dict[str, str | bool]:
    """Returns "folder" and "sha256" of this process's code, at the first call; in a git checkout
    also "commit" and whether files are "changed"."""
    found: dict[str, str | bool] = {"folder": str(PACKAGE), "sha256": files_hash(PACKAGE)}
    return found | (code_revision(CHECKOUT) or {})


def code_revision(checkout: Path) -> dict[str, Any] | None:
    """Returns the commit of a git checkout, and whether files differ from it or are not in it;
    None if the folder is no checkout (an installed package may lie inside one), or without git."""
    if not (checkout / ".git").exists():
        return None
    try:
        commit = _git(checkout, "rev-parse", "HEAD")
        changed = _git(checkout, "status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changed)}


def files_hash(folder: Path, patterns: Sequence[str] = ("**/*.py",)) -> str:
    """Returns a hash of the names and contents of a folder's files, all *.py if not told others."""
    digest = hashlib.sha256()
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(found):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def code_in_words(code: Mapping[str, Any]) -> str:
    """Returns `running_code` as "FOLDER at COMMIT, changed (sha256 ...)"; leaves out what is not
    recorded."""
    words = str(code.get("folder", "a folder that is not recorded"))
    if commit := code.get("commit"):
        words += f" at {commit[:7]}" + (", changed" if code.get("changed") else "")
    return words + (f" (sha256 {code['sha256'][:12]})" if "sha256" in code else "")


def checkout_around(folder: Path) -> Path | None:
    """Returns the checkout of titan_moe that a folder lies in."""
    for each in (folder, *folder.parents):
        if (each / "run_train.sh").is_file() and (each / "titan_moe" / "__init__.py").is_file():
            return each
    return None


def wanted_checkout(environment: Mapping[str, str]) -> Path | None:
    """Returns the checkout whose code this process must run: that of the run_train.sh that started
    it (TITAN_MOE_CHECKOUT), else the one around the working folder; None: any."""
    named = environment.get("TITAN_MOE_CHECKOUT")
    found = Path(named) if named else checkout_around(Path.cwd())
    return None if found is None else found.resolve()


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()
