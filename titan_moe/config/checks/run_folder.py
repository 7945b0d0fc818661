"""Whether a run may go on in its folder, where checkpoints must be of the same run, or has what it
is to begin with."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_moe.config.job_config import Checkpoint, JobConfig
from titan_moe.runtime.files import parse_json

_MODEL = ("model.name", "model.flavor")
_DATA = ("training.dataset", "training.text_column", "training.blend", "debug.seed")


def check_run_folder(job: JobConfig, dimensions: dict[str, Any]) -> list[str]:
    """One line for each key by which `job` is another run than the one that left checkpoints in its
    folder: another model, data set or seed; or where there are none, for weights that are to be
    loaded and are not there. Layout, batch, schedule and the rest may change, or are
    compared with the checkpoint itself when it is loaded; a path may, as long as it leads to the
    same files.

    Args:
        dimensions: of the job's model (models.hf.as_record).
    """
    folder = Path(job.job.dump_folder) / job.checkpoint.folder
    initial = job.checkpoint.initial_load_path
    if initial and not Path(initial).exists() and not any(folder.glob("step-*")):
        line = "does not exist: name a step folder of this program"
        in_hf = ", or a Hugging Face folder with checkpoint.initial_load_in_hf=true"
        return [f"checkpoint.initial_load_path={initial} {line}{in_hf}"]
    found = _manifest(job.checkpoint, folder)
    if found is None:
        return []
    checkpoint, manifest = found
    if manifest.get("model_only") and manifest.get("step") == 0:
        if job.checkpoint.create_seed_checkpoint:
            return []  # It is written anew.
        keys: tuple[str, ...] = _MODEL  # Any data may follow on initial weights.
    else:
        keys = (*_MODEL, *_DATA)
    same_model = json.loads(json.dumps(dimensions)) == manifest.get("model")
    if "model" in job.checkpoint.exclude_from_loading or same_model:
        keys = tuple(key for key in keys if key not in _MODEL)
    if "dataloader" in job.checkpoint.exclude_from_loading:
        keys = tuple(key for key in keys if key not in _DATA)
    return list(_differences(keys, job, checkpoint, manifest["job"]))


def _manifest(config: Checkpoint, folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to go on from, or the latest, and its manifest. None where there is none, or
    none that can be read: loading it says why."""
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    steps = [int(name) for name in names if name.isdecimal()]
    if not steps:
        return None
    checkpoint = folder / f"step-{config.load_step if config.load_step in steps else max(steps)}"
    try:
        manifest = parse_json((checkpoint / "manifest.json").read_bytes())
        readable = isinstance(manifest["job"], dict)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (checkpoint, manifest) if readable else None


def _differences(
    keys: tuple[str, ...], job: JobConfig, checkpoint: Path, saved: dict[str, Any]
) -> Iterator[str]:
    record = job.model_dump(mode="json")
    if record["training"]["blend"] and "training.dataset" in keys:
        keys = tuple(key for key in keys if key != "training.dataset")  # Not used then.
    for key in keys:
        table, name = key.split(".")
        try:
            old, new = (_value(each[table][name]) for each in (saved, record))
        except (KeyError, TypeError, AttributeError):  # A key that its version had not.
            continue
        if old != new:
            there = f", where checkpoint.initial_load_path={checkpoint} starts from its weights"
            yield (
                f"{key}={new!r}, and {checkpoint} is of a run with {old!r}: set it to that, or "
                f"choose another job.dump_folder{'' if key in _MODEL else there}"
            )


def _value(value: Any) -> Any:
    """What is compared: of a blend, all but the paths."""
    if not isinstance(value, list):
        return value
    return [{key: part[key] for key in part if key != "dataset_path"} for part in value]
