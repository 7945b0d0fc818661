"""The choice of the checkpoint that a run goes on from."""

import logging
from pathlib import Path
from typing import NamedTuple

from titan_moe.checkpoint.folder import bring_back
from titan_moe.checkpoint.manifest import Manifest, read_manifest
from titan_moe.config.job_config import Checkpoint
from titan_moe.distributed.agreement import on_rank_zero
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import saved_steps, step_folder

logger = logging.getLogger(__name__)


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
    if not config.load_only:
        bring_back(folder)
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
            raise RunError(
                f"{own} holds the model only (checkpoint.last_save_model_only) and cannot be "
                "resumed; choose an earlier checkpoint.load_step, or start in another "
                f"job.dump_folder with checkpoint.initial_load_path={own}"
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
    """The step that `Checkpointer.load` will go on after; 0: from the beginning. Collective."""
    folder = dump_folder / config.folder
    doing = f"cannot load a checkpoint from {folder}"
    found = on_rank_zero(lambda: find_checkpoint(config, folder), doing=doing)
    if found is None or found.model_only or "train_state" in found.excluded:
        return 0
    return found.manifest.step
