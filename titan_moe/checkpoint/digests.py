"""SHA256SUMS: a SHA-256 of every file of a folder, in the form that `sha256sum --check` reads.

It is written last, and a change of any byte of the folder shows, its own included: a damaged line
agrees with no file, and a missing line leaves a file without one.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch.distributed as dist

from titan_moe.distributed.agreement import on_every_rank, on_rank_zero
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import sha256_of

DIGESTS = "SHA256SUMS"


def write_listing(folder: Path, known: Mapping[str, str]) -> None:
    """Write SHA256SUMS; reads the files of the folder whose digests are not known."""
    digests = {**known, **digests_of(folder, set(files(folder)) - known.keys())}
    with (folder / DIGESTS).open("w", encoding="utf-8") as file:
        file.writelines(f"{digests[name]}  {name}\n" for name in sorted(digests))
        file.flush()
        os.fsync(file.fileno())


def digests_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Digests of files of a folder, by name."""
    return {name: sha256_of(folder / name) for name in names}


def files(folder: Path) -> list[str]:
    """All files of a folder and of folders in it but SHA256SUMS, sorted, relative to it."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if str(path) != DIGESTS)


def read_digests(folder: Path) -> dict[str, str] | None:
    """Returns digests by the file's name; None where there is no SHA256SUMS. A damaged line names
    no file or agrees with none."""
    try:
        lines = (folder / DIGESTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    digests = {}
    for line in lines:
        value, _, name = line.partition("  ")
        digests[name] = value
    return digests


def read_checked(path: Path) -> bytes:
    """A file's bytes, which SHA256SUMS must agree with, if there is one beside it.

    Raises RunError where it does not, and FileNotFoundError.
    """
    data = path.read_bytes()
    digests = read_digests(path.parent)
    if digests is not None and digests.get(path.name) != hashlib.sha256(data).hexdigest():
        raise RunError(f"{path} is damaged: {_why(digests, path.name)}")
    return data


def damaged_files(folder: Path, digests: Mapping[str, str]) -> list[str]:
    """One error line per file that is missing, damaged or not listed; reads all of them."""
    lines, present = [], set(files(folder))
    for name in sorted(digests.keys() | present):
        if name not in present:
            lines.append(f"{name} is missing")
        elif name not in digests or sha256_of(folder / name) != digests[name]:
            lines.append(f"{name} is damaged: {_why(digests, name)}")
    return lines


def check_listed(folder: Path, *, doing: str) -> None:
    """Raises RunError for a file with another digest than the folder's SHA256SUMS lists. Each file
    is read on one rank. Collective."""
    digests = on_rank_zero(lambda: read_digests(folder), doing=doing) or {}
    mine = dict(sorted(digests.items())[dist.get_rank() :: dist.get_world_size()])

    def check() -> None:
        for name, wanted in mine.items():
            if not (folder / name).is_file() or sha256_of(folder / name) != wanted:
                raise RunError(
                    f"{folder / name} is not what {DIGESTS} beside it says: copy the folder again, "
                    f"or, if you changed the file, remove {DIGESTS}"
                )

    on_every_rank(check, doing=doing)


def _why(digests: Mapping[str, str], name: str) -> str:
    return f"it is not what {DIGESTS} says" if name in digests else f"{DIGESTS} does not list it"
