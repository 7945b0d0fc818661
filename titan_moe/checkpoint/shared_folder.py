"""Folders that all ranks write or read together."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from titan_moe.checkpoint.digests import (
    DIGESTS,
    digest,
    digests_of,
    files,
    read_digests,
    write_listing,
)
from titan_moe.checkpoint.safe_reader import SafeReader
from titan_moe.checkpoint.storage import abandon, aside_of, commit, fsync, refuse_existing
from titan_moe.distributed.agreement import on_every_rank, on_rank_zero
from titan_moe.runtime.errors import RunError


@contextmanager
def new_folder(target: Path, needed: int, *, doing: str) -> Iterator[Path]:
    """A folder to write into, which gets its name `target` when all in it is on disk; collective.

    Args:
        needed: bytes that will be written.
        doing: as on_rank_zero's.

    Raises RunError when there is anything of that name, or the disk has less free. Nothing is left
    when anything raises.
    """
    aside = on_rank_zero(lambda: _begin_new(target, needed), doing=doing)
    try:
        yield aside
        own = files(aside)[dist.get_rank() :: dist.get_world_size()]
        write_digests(aside, own, doing=doing)
        on_rank_zero(lambda: _commit_new(aside, target), doing=doing)
    except BaseException:
        if dist.get_rank() == 0:
            abandon(aside)
        raise


def write_digests(folder: Path, own: Iterable[str], *, doing: str) -> None:
    """Digest all files of a folder; collective, and the last thing that is written there.

    Args:
        own: of this rank, names relative to the folder. What no rank names, rank 0 reads.
        doing: as on_every_rank's.
    """
    mine = on_every_rank(lambda: digests_of(folder, own), doing=doing)
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    known = {name: found for digests in everyone for name, found in digests.items()}
    on_rank_zero(lambda: write_listing(folder, known), doing=doing)


def check_complete(folder: Path) -> None:
    """Raises RunError where a rank's tensor files are not in the folder that rank 0 sees."""
    try:
        SafeReader(folder)
    except RunError as error:
        # Each node has written to a disk of its own.
        raise RunError(
            f"{error}: it was removed, or job.dump_folder is not one folder for all nodes"
        ) from None


def check_listed(folder: Path, *, doing: str) -> None:
    """Raises RunError where a file that a folder's SHA256SUMS lists is not what it says; reads each
    on one rank. Collective."""
    digests = on_rank_zero(lambda: read_digests(folder), doing=doing) or {}
    mine = dict(sorted(digests.items())[dist.get_rank() :: dist.get_world_size()])

    def check() -> None:
        for name, wanted in mine.items():
            if not (folder / name).is_file() or digest(folder / name) != wanted:
                raise RunError(
                    f"{folder / name} is not what {DIGESTS} beside it says: copy the folder again, "
                    f"or, if you changed the file, remove {DIGESTS}"
                )

    on_every_rank(check, doing=doing)


def _begin_new(target: Path, needed: int) -> Path:
    refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise RunError(f"{target} needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    aside = aside_of(target, "writing")
    shutil.rmtree(aside, ignore_errors=True)  # Of one that was killed.
    aside.mkdir()
    return aside


def _commit_new(aside: Path, target: Path) -> None:
    for path in aside.rglob("*"):
        fsync(path)
    refuse_existing(target)
    commit(aside, target)
