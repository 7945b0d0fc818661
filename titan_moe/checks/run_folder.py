"""Checks that a run may go on in its folder: checkpoints there must be of the same run."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from titan_moe.checks.base import Rule, Run
from titan_moe.config.errors import Mistake, as_written
from titan_moe.config.job_config import OPTIMIZER_KEYS, Checkpoint, JobConfig
from titan_moe.config.parse import resolve
from titan_moe.config.training_stages import job_of_step
from titan_moe.runtime.files import saved_steps, step_folder

_MODEL = ("model.name", "model.flavor")
_DATA = ("training.dataset", "training.text_column", "training.blend", "debug.seed")


def check_run_folder(job: JobConfig, dimensions: dict[str, Any]) -> list[str]:
    """Returns one line for each key by which `job` is another run than its folder's checkpoints.

    Model, data set and seed must be the same, and so must keys that decide which tensors there are,
    and of which type. Layout, batch, schedule and the rest may change, or are compared with the
    checkpoint itself when it is loaded; a path may change as long as it leads
    to the same files.

    Args:
        dimensions: of the job's model (models.hf.as_record).
    """
    folder = Path(job.job.dump_folder) / job.checkpoint.folder
    excluded = job.checkpoint.exclude_from_loading
    if (found := _manifest(job.checkpoint, folder)) is None:
        return []
    checkpoint, manifest = found
    is_seed = manifest.get("model_only") and manifest.get("step") == 0
    if is_seed and job.checkpoint.create_seed_checkpoint:
        return []  # It is written anew.
    same_model = json.loads(json.dumps(dimensions)) == manifest.get("model")
    keys = [] if "model" in excluded or same_model else [*_MODEL]
    if not is_seed and "dataloader" not in excluded:  # Any data may follow on initial weights.
        keys += _DATA
    saved = manifest["job"]
    lines = list(_differences(keys, job, checkpoint, saved))
    if lines or not job.checkpoint.enable:
        return lines
    if "model" not in excluded:
        other = dimensions.get("num_mtp_layers") != manifest["model"].get("num_mtp_layers")
        keys = ["training.dtype"] + ["model.num_mtp_layers"] * other
        lines += _differences(keys, job, checkpoint, saved)
    if manifest.get("model_only") or "optimizer" in excluded:
        return lines
    keys = ["optimizer.state_dtype"]
    if OPTIMIZER_KEYS[job.optimizer.name] != OPTIMIZER_KEYS[saved["optimizer"]["name"]]:
        keys.append("optimizer.name")
    if dimensions.get("attention", {}).get("indexer"):
        keys.append("training.indexer_stage")
    also = '; checkpoint.exclude_from_loading=["optimizer"] begins with fresh states'
    return lines + [line + also for line in _differences(keys, job, checkpoint, saved)]


def position_rule(job: JobConfig) -> Rule:
    """Returns the rule that a run reads its data in sequences and batches as its folder's
    checkpoint did, whose data position is of no use to another; beside a rule on the layout, so
    that its remedies are tried with it."""
    folder, config = Path(job.job.dump_folder) / job.checkpoint.folder, job.checkpoint
    found = _manifest(config, folder)
    unread = config.create_seed_checkpoint or "dataloader" in config.exclude_from_loading
    if found is None or found[1].get("model_only") or unread or not config.enable:
        return lambda run: ()
    checkpoint, manifest = found
    try:
        step = int(manifest["step"])
        saved = job_of_step(JobConfig.model_validate(manifest["job"]), step).training
    except (ValueError, KeyError, TypeError):  # Another version's: loading it says so.
        return lambda run: ()

    def rule(run: Run) -> Iterable[Mistake]:
        if run.shard is None or saved.global_batch_size == -1:
            return
        job = resolve(run.job, run.world_size)
        # A training stage may begin after the checkpoint's step.
        now, later = (job_of_step(job, each).training for each in (step, step + 1))
        for key in ("seq_len", "global_batch_size"):
            old = getattr(saved, key)
            if old not in (getattr(now, key), getattr(later, key)):
                change = {f"training.{key}": old}
                local = [
                    change | {"training.local_batch_size": size}
                    for size in range(now.local_batch_size - 1, 0, -1)
                ]
                yield Mistake(
                    f"training.{key}={getattr(now, key)}: the data position of {checkpoint} was "
                    f"taken with {old}",
                    [[change, *local]],
                    also="begin in another job.dump_folder, where checkpoint.initial_load_path="
                    f"{checkpoint} starts from its weights",
                )

    return rule


def _manifest(config: Checkpoint, folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Returns the checkpoint to go on from and its manifest.

    None where there is none, or where it cannot be read: loading it says why.
    """
    if not (steps := saved_steps(folder)):
        return None
    checkpoint = step_folder(folder, config.load_step if config.load_step in steps else steps[-1])
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_bytes())
        return (checkpoint, manifest) if manifest["job"]["training"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _differences(
    keys: list[str], job: JobConfig, checkpoint: Path, saved: dict[str, Any]
) -> Iterator[str]:
    record = job.model_dump(mode="json")
    if record["training"]["blend"]:  # training.dataset is not read then.
        keys = [key for key in keys if key != "training.dataset"]
    for key in keys:
        table, name = key.split(".")
        old, new = (_without_paths(each[table][name]) for each in (saved, record))
        if old != new:
            there = f", where checkpoint.initial_load_path={checkpoint} starts from its weights"
            there = "" if key == "training.dtype" or key.startswith("model.") else there
            yield (
                f"{key}={as_written(new)}, and {checkpoint} is of a run with {as_written(old)}: "
                f"set it to that, or choose another job.dump_folder{there}"
            )


def _without_paths(value: Any) -> Any:
    """Returns a blend without its paths, and any other value as it is."""
    if not isinstance(value, list):
        return value
    return [{key: part[key] for key in part if key != "dataset_path"} for part in value]
