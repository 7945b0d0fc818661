"""Checkpoint folders: `step-N`, each complete or invisible.

A save goes into a hidden sibling, which is renamed when everything in it is on disk. A killed save
leaves that sibling behind: it is never read, and the next save removes it. An older checkpoint of
the same step waits in another sibling until the new one has the name, and gets it back otherwise.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from titan_moe.distributed.agreement import on_rank_zero
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import LOCK, fsync, saved_steps, set_aside, step_folder, take_folder

_ASIDE = re.compile(r"\.step-\d+\.(writing|deleting)")
_REPLACED = re.compile(r"\.(step-\d+)\.replaced")


def hf_folder(folder: Path, step: int) -> Path:
    """Path of the Hugging Face export of a step's model."""
    return folder / f"step-{step}-hf"


def begin(target: Path) -> Path:
    """Remove what killed saves left behind; make the folder that `target` is written into."""
    target.parent.mkdir(parents=True, exist_ok=True)
    bring_back(target.parent)
    for path in target.parent.iterdir():
        if _ASIDE.fullmatch(path.name):
            shutil.rmtree(path)
    aside = _aside_of(target, "writing")
    aside.mkdir()
    return aside


def commit(aside: Path, target: Path) -> None:
    """Make a fully written folder visible under its name, replacing an older one of that name."""
    for path in [*aside.rglob("*"), aside]:
        if path.suffix != ".distcp":  # The rank that wrote it has waited.
            fsync(path)
    replaced = _aside_of(target, "replaced")
    if replaces := target.exists():
        # No rename replaces a filled folder. Killed between the two, `bring_back` undoes the first.
        target.rename(replaced)
    try:
        aside.rename(target)
    except OSError:
        bring_back(target.parent)
        raise
    fsync(target.parent)
    if replaces:
        shutil.rmtree(replaced)


def bring_back(folder: Path) -> None:
    """Give a checkpoint its name again that was to be replaced when the save was killed; for the
    one run that writes to `folder`."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _REPLACED.fullmatch(path.name):
            target = path.with_name(match[1])
            if target.exists():
                shutil.rmtree(path)
            else:
                path.rename(target)


def abandon(aside: Path) -> None:
    """Remove a folder that will not be committed, as far as that is possible."""
    shutil.rmtree(aside, ignore_errors=True)


def keep_latest(folder: Path, *, count: int, newest: int) -> None:
    """Remove all but the `count` latest checkpoints, or none where that is 0; `newest` and a seed
    checkpoint always stay. If killed midway, what remains of one is invisible."""
    for step in saved_steps(folder)[:-count] if count else []:
        if step not in (0, newest):
            target = step_folder(folder, step)
            aside = _aside_of(target, "deleting")
            target.rename(aside)
            fsync(folder)
            shutil.rmtree(aside)


def set_aside_later(folder: Path, step: int) -> list[Path]:
    """Rename checkpoints of later steps than `step`; returns where they are now.

    A run that goes back to `step` leaves them behind: they must not be resumed from, count among
    the latest, or be lost.
    """
    moved = []
    for later in (number for number in saved_steps(folder) if number > step):
        moved.append(set_aside(step_folder(folder, later), f"step-{later}.abandoned-{{}}".format))
    if moved:
        fsync(folder)
    return moved


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
        on_rank_zero(lambda: _commit_new(aside, target), doing=doing)
    except BaseException:
        if dist.get_rank() == 0:
            abandon(aside)
        raise


def refuse_existing(target: Path) -> None:
    """Raises RunError when there is anything of that name."""
    if target.exists():
        raise RunError(f"{target} exists: name another folder, or remove it")


def _aside_of(target: Path, why: str) -> Path:
    return target.with_name(f".{target.name}.{why}")


def _begin_new(target: Path, needed: int) -> Path:
    refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise RunError(f"{target} needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    aside = _aside_of(target, "writing")
    take_folder(aside, "name")
    for path in set(aside.iterdir()) - {aside / LOCK}:  # A killed process has left it.
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return aside


def _commit_new(aside: Path, target: Path) -> None:
    (aside / LOCK).unlink()
    refuse_existing(target)
    commit(aside, target)
