"""Checkpoint folders: `step-N`, each complete or invisible, and the one that a run goes on from.

A save goes into a hidden sibling, which is renamed when everything in it is on disk. A killed save
leaves that sibling behind: it is never read, and the next save removes it.
"""

import logging
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from titan_moe.checkpoint.manifest import Manifest, read_manifest, write_manifest
from titan_moe.config.job_config import Checkpoint
from titan_moe.distributed.agreement import on_rank_zero
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import LOCK, fsync, saved_steps, set_aside, step_folder, take_folder

logger = logging.getLogger(__name__)

_ASIDE = re.compile(r"\.step-\d+\.(writing|deleting)")


def hf_folder(folder: Path, step: int) -> Path:
    """Returns the path of the Hugging Face export of a step's model."""
    return folder / f"step-{step}-hf"


def begin(target: Path) -> Path:
    """Remove what killed saves left behind; make the folder that `target` is written into."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in target.parent.iterdir():
        if _ASIDE.fullmatch(path.name):
            shutil.rmtree(path)
    aside = _aside_of(target, "writing")
    aside.mkdir()
    return aside


def commit(aside: Path, target: Path) -> None:
    """Make a fully written folder visible under its name; an older one of that name is kept."""
    for path in [*aside.rglob("*"), aside]:
        if path.suffix != ".distcp":  # The rank that wrote it has waited.
            fsync(path)
    if target.exists():
        _leave_behind(target, "an older checkpoint of this step is replaced")
    aside.rename(target)
    fsync(target.parent)


def publish(
    aside: Path, target: Path, manifest: Manifest, names: Iterable[str], keep_latest_k: int
) -> None:
    """Rank 0's end of a save: add the manifest to a folder in which all ranks' files are on disk,
    and make it visible.

    Args:
        names: the ranks' files.

    Raises RunError when one of them is not there, and OSError.
    """
    for name in names:
        if not (aside / name).is_file():
            raise RunError(
                f"checkpoint {aside} is incomplete: {name} is missing: it was removed, or "
                "job.dump_folder is not one folder for all nodes"
            )
    write_manifest(aside, manifest)
    commit(aside, target)
    keep_latest(target.parent, count=keep_latest_k, newest=manifest.step)


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


def set_aside_later(folder: Path, step: int) -> None:
    """Rename checkpoints of later steps than `step`, and log their new names.

    A run that goes back to `step` leaves them behind: they must not be resumed from, count among
    the latest, or be lost.
    """
    for later in saved_steps(folder):
        if later > step:
            _leave_behind(step_folder(folder, later), "a later step is left behind")


def _leave_behind(path: Path, why: str) -> None:
    kept = set_aside(path, f"{path.name}.abandoned-{{}}".format)
    fsync(path.parent)
    logger.warning("%s, kept as %s", why, kept)


@contextmanager
def new_folder(target: Path, needed: int, *, doing: str) -> Iterator[Path]:
    """Yields a folder to write into, which gets its name `target` when all in it is on disk;
    collective.

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
            shutil.rmtree(aside, ignore_errors=True)
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


class Found(NamedTuple):
    """The checkpoint to load."""

    path: Path
    manifest: Manifest
    model_only: bool
    """True if only its model is loaded."""
    excluded: frozenset[str]
    """Parts of the checkpoint that are not to be loaded."""

    @property
    def remark(self) -> str:
        """Names what is not loaded, for the log."""
        if self.model_only:
            return " (model only)"
        return f" (without {', '.join(sorted(self.excluded))})" if self.excluded else ""


def find_checkpoint(config: Checkpoint, folder: Path) -> Found | None:
    """Returns the checkpoint to load; `folder` holds the run's own ones. Raises RunError if the one
    that is asked for is not there or of no use.

    load_step and exclude_from_loading take effect once in a folder. If a run with the same two has
    saved checkpoints since, the latest of them is loaded whole: a run that stopped, was killed or
    was queued again goes on, whatever other key was changed.
    """
    if not config.enable:
        return None
    steps = saved_steps(folder)
    if config.load_step >= 0 or config.exclude_from_loading:
        begun = _latest_under_same_keys(config, folder, steps)
        if begun is not None:
            config = config.model_copy(update={"load_step": begun, "exclude_from_loading": []})
    excluded = frozenset[str](config.exclude_from_loading)
    if config.load_step >= 0 and config.load_step not in steps:
        raise RunError(
            f"checkpoint.load_step={config.load_step}: {folder} has "
            + (f"steps {', '.join(map(str, steps))}: choose one" if steps else "no checkpoint")
        )
    if steps:
        own = step_folder(folder, config.load_step if config.load_step >= 0 else steps[-1])
        manifest = read_manifest(own)
        if manifest.model_only and manifest.step > 0:
            begin = f"checkpoint.initial_load_path={own}"
            if manifest.base:
                begin = "what titan-moe hf export makes of it as lora.initial_load_path"
            raise RunError(
                f"{own} holds the model only (checkpoint.last_save_model_only) and cannot be "
                "resumed; choose an earlier checkpoint.load_step, or start in another "
                f"job.dump_folder with {begin}"
            )
        return Found(own, manifest, manifest.model_only, excluded)
    if config.initial_load_path is None or config.initial_load_in_hf:
        return None
    initial = Path(config.initial_load_path)
    manifest = read_manifest(initial)
    if manifest.model_only and not config.initial_load_model_only:
        raise RunError(
            f"checkpoint.initial_load_path={initial} holds the model only: "
            "set checkpoint.initial_load_model_only=true"
        )
    return Found(initial, manifest, config.initial_load_model_only, excluded)


def _latest_under_same_keys(config: Checkpoint, folder: Path, steps: list[int]) -> int | None:
    """Returns the latest step that a run with the same two keys has saved."""
    keys = {"load_step": config.load_step, "exclude_from_loading": config.exclude_from_loading}
    named = {key: value for key, value in keys.items() if value not in (-1, [])}
    for step in reversed(steps):
        try:
            saved_by = read_manifest(step_folder(folder, step)).job.get("checkpoint", {})
        except RunError:  # Loading says it, where that is the one to load.
            continue
        if all(saved_by.get(key) == value for key, value in keys.items()):
            logger.warning(
                "checkpoint.%s took effect in this folder before and is not followed: going on "
                "from step %d; to follow it again, move the later checkpoints out of %s",
                *(" and ".join(f"{key}={value}" for key, value in named.items()), step, folder),
            )
            return step
    return None


def step_to_go_on_from(config: Checkpoint, dump_folder: Path) -> int:
    """Returns the step that `Checkpointer.load` will go on after; 0: from the beginning.
    Collective."""
    folder = dump_folder / config.folder
    doing = f"cannot load a checkpoint from {folder}"
    found = on_rank_zero(lambda: find_checkpoint(config, folder), doing=doing)
    if found is None or found.model_only or "train_state" in found.excluded:
        return 0
    return found.manifest.step
