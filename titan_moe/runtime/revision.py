"""Which code is running: its folder, its commit, and a hash of its files."""

import hashlib
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder that titan_moe is imported from."""
CHECKOUT = PACKAGE.parent
"""The checkout that it lies in, if it lies in one."""


@cache
def running_code() -> dict[str, str | bool]:
    """The code of this process, as it is when this is first called.

    "folder" and "sha256", and of a git checkout also "commit" and whether files are "changed".
    """
    found: dict[str, str | bool] = {"folder": str(PACKAGE), "sha256": package_hash(PACKAGE)}
    return found | (code_revision(CHECKOUT) or {})


def code_revision(checkout: Path) -> dict[str, str | bool] | None:
    """The commit of a git checkout, and whether tracked files differ from it; None if the folder is
    none (an installed package may lie inside another repository), and where there is no git."""
    if not (checkout / ".git").exists():
        return None
    try:
        commit = _git(checkout, "rev-parse", "HEAD")
        changed = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changed)}


def package_hash(package: Path) -> str:
    """A hash of the names and contents of all *.py files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def code_in_words(code: Mapping[str, Any]) -> str:
    """What `running_code` found: "FOLDER at COMMIT, changed (sha256 ...)"; what is not recorded is
    left out."""
    words = str(code.get("folder", "a folder that is not recorded"))
    if commit := code.get("commit"):
        words += f" at {commit[:7]}" + (", changed" if code.get("changed") else "")
    return words + (f" (sha256 {code['sha256'][:12]})" if "sha256" in code else "")


def checkout_around(folder: Path) -> Path | None:
    """The checkout of titan_moe that a folder lies in."""
    for each in (folder, *folder.parents):
        if (each / "run_train.sh").is_file() and (each / "titan_moe" / "__init__.py").is_file():
            return each
    return None


def wanted_checkout(environment: Mapping[str, str]) -> Path | None:
    """The checkout whose code this process is to run: that of the run_train.sh that started it
    (TITAN_MOE_CHECKOUT), else the one around the working folder; None: any."""
    named = environment.get("TITAN_MOE_CHECKOUT")
    found = Path(named) if named else checkout_around(Path.cwd())
    return None if found is None else found.resolve()


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()
