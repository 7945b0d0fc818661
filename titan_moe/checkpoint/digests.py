"""Digests of the files of a checkpoint or an export: what a load compares, and `titan-moe check`.

manifest.json lists a checkpoint's files. An export has SHA256SUMS, which `sha256sum --check` reads.
"""

from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path

import torch.distributed as dist

from titan_moe.distributed.agreement import from_every_rank, on_every_rank, on_rank_zero
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import LOCK, sha256_of

MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file, or the size of one that holds a checkpoint's tensors: these
    have checksums."""
    return f"{path.stat().st_size} bytes" if path.suffix == ".distcp" else sha256_of(path)


def files(folder: Path) -> list[str]:
    """Returns all files of a folder and of folders in it, sorted, relative to it, but for the one
    that lists them."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted({str(path) for path in paths} - {MANIFEST, SUMS, LOCK})


def damage(
    folder: Path, digests: Mapping[str, str], listing: str, read: Collection[str]
) -> list[str]:
    """Returns one error line per file that is missing, not listed, or not as it was written.

    Args:
        listing: the file that holds the digests.
        read: names of the files whose digests are compared.
    """
    lines = []
    for name in sorted({*digests, *read}):
        if not (folder / name).is_file():
            lines.append(f"{name} is missing")
        elif name not in digests:
            lines.append(f"{name} is damaged: {listing} does not list it")
        elif name in read and digest(folder / name) != digests[name]:
            lines.append(f"{name} is damaged: it is not what {listing} says")
    return lines


def write_sums(folder: Path, *, doing: str) -> None:
    """Write an export's SHA256SUMS. Each file is read on one rank. Collective."""
    mine = files(folder)[dist.get_rank() :: dist.get_world_size()]
    shares = from_every_rank(
        lambda: [f"{digest(folder / name)}  {name}\n" for name in mine], doing=doing
    )
    text = "".join(sorted(chain.from_iterable(shares)))
    on_rank_zero(lambda: (folder / SUMS).write_text(text, encoding="utf-8"), doing=doing)


def read_sums(folder: Path) -> dict[str, str]:
    """Returns digests by the file's name; none where there is no SHA256SUMS. A damaged line names
    no file or agrees with none."""
    if not (folder / SUMS).is_file():
        return {}
    lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    return {name: value for value, _, name in (line.partition("  ") for line in lines)}


def check_sums(folder: Path, *, doing: str) -> None:
    """Raises RunError for a file that is not what the folder's SHA256SUMS says. Each file is read
    on one rank. Collective."""
    digests = on_rank_zero(lambda: read_sums(folder), doing=doing)
    mine = sorted(digests)[dist.get_rank() :: dist.get_world_size()]

    def check() -> None:
        if lines := damage(folder, digests, SUMS, mine):
            remedy = f"copy the folder again, or, if you changed the file, remove {SUMS}"
            raise RunError(f"{folder}: {lines[0]}: {remedy}")

    on_every_rank(check, doing=doing)
