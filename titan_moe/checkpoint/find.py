"""Which checkpoint a run goes on from."""

from pathlib import Path

from titan_moe.checkpoint import storage
from titan_moe.checkpoint.manifest import Manifest, read_manifest
from titan_moe.config.job_config import Checkpoint
from titan_moe.distributed.agreement import on_rank_zero
from titan_moe.runtime.errors import RunError


def find_checkpoint(config: Checkpoint, folder: Path) -> tuple[Path, Manifest, bool] | None:
    """The checkpoint to load, its manifest, and whether only its model is wanted; `folder` holds
    the run's own ones. RunError where the one that is asked for is not there or of no use."""
    if not config.enable:
        return None
    steps = storage.saved_steps(folder)
    if config.load_step >= 0 and config.load_step not in steps:
        raise RunError(
            f"checkpoint.load_step={config.load_step}: {folder} has "
            + (f"steps {', '.join(map(str, steps))}" if steps else "no checkpoint")
        )
    if steps:
        own = storage.step_folder(folder, config.load_step if config.load_step >= 0 else steps[-1])
        manifest = read_manifest(own)
        if manifest.model_only and manifest.step > 0:
            raise RunError(
                f"{own} holds the model only (checkpoint.last_save_model_only) and cannot be "
                "resumed; choose an earlier checkpoint.load_step, or start in another "
                f"job.dump_folder with checkpoint.initial_load_path={own}"
            )
        return own, manifest, manifest.model_only
    if config.initial_load_path is None or config.initial_load_in_hf:
        return None
    initial = Path(config.initial_load_path)
    manifest = read_manifest(initial)
    if manifest.model_only and not config.initial_load_model_only:
        raise RunError(
            f"checkpoint.initial_load_path={initial} holds the model only: "
            "set checkpoint.initial_load_model_only=true"
        )
    return initial, manifest, config.initial_load_model_only


def step_to_go_on_from(config: Checkpoint, dump_folder: Path) -> int:
    """The step that `Checkpointer.load` will go on after; 0: from the beginning. Collective."""
    folder = dump_folder / config.folder
    doing = f"cannot load a checkpoint from {folder}"
    found = on_rank_zero(lambda: find_checkpoint(config, folder), doing=doing)
    if found is None:
        return 0
    _, manifest, model_only = found
    return 0 if model_only or "train_state" in config.exclude_from_loading else manifest.step
