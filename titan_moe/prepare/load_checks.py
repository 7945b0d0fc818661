"""Checks of what a run will load, in one plain process before any rank starts.

Names, shapes and positions are read, and no tensor but adapters; nothing is written. torch is
imported, and the data opened, only where there is something to load.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import JobConfig
from titan_moe.config.training_stages import job_of_step
from titan_moe.models.config import ModelConfig
from titan_moe.models.hf import HFModel
from titan_moe.runtime.errors import RunError

if TYPE_CHECKING:
    from titan_moe.checkpoint.folder import Found
    from titan_moe.data.sequences import Identity


def check_loading(job: JobConfig, model: ModelConfig) -> list[str]:
    """Returns why the run's checkpoint, or the weights that it begins with, cannot be loaded.

    Args:
        job: a resolved configuration whose own keys are right.
    """
    config, folder = job.checkpoint, Path(job.job.dump_folder) / job.checkpoint.folder
    named = config.initial_load_path or config.initial_load_in_hf or config.load_step >= 0
    loads = config.enable and (named or any(folder.glob("step-*")))
    if not loads or config.create_seed_checkpoint:
        return []
    from titan_moe.checkpoint.folder import find_checkpoint
    from titan_moe.checkpoint.hf.read import check_folder

    try:
        found = find_checkpoint(config, folder)
        if found is not None:
            _check_model(job, model, found, is_own=found.path.parent == folder)
            _check_frozen(job, model, found)
            _check_data(job, found)
        elif config.initial_load_in_hf and "model" not in config.exclude_from_loading:
            weights = config.initial_load_path or job.model.hf_assets_path
            check_folder(Path(weights or ""), HFModel(job.model.name, model))
    except (RunError, ConfigError) as error:
        key = f"checkpoint.initial_load_path={config.initial_load_path}: "
        named = bool(config.initial_load_path) and not any(folder.glob("step-*"))
        lines = str(error).splitlines()
        return [key * (named and not line.startswith("checkpoint.")) + line for line in lines]
    return []


def check_adapters(job: JobConfig, model: ModelConfig) -> list[str]:
    """Returns why the adapters that a run begins with cannot be loaded, or those that it ends with
    have no place in a PEFT folder. Takes what `check_loading` takes."""
    folder = Path(job.job.dump_folder) / job.checkpoint.folder
    path = None if any(folder.glob("step-*")) else job.lora.initial_load_path
    exports = job.checkpoint.enable and job.checkpoint.last_save_in_hf
    if job.lora.rank is None or not (path or exports):
        return []
    from titan_moe.checkpoint.hf.assets import asset_folders
    from titan_moe.checkpoint.hf.names import model_shapes
    from titan_moe.checkpoint.hf.peft import pairs_there, read_adapters

    hf_model, key = HFModel(job.model.name, model), f"lora.initial_load_path={path}"
    try:
        if path is not None:
            folders = asset_folders(Path(path), job.model_dump(mode="json"))
            read_adapters(Path(path), hf_model, job.lora, folders)
        key = "checkpoint.last_save_in_hf=true"
        pairs_there(hf_model, model_shapes(model, job.lora))
    except (RunError, ConfigError) as error:
        return [f"{key}: {line}" for line in str(error).splitlines()]
    return []


def _check_model(job: JobConfig, model: ModelConfig, found: "Found", *, is_own: bool) -> None:
    """Raises RunError for tensors that are not the model's. Adapters are in the run's own
    checkpoints alone, and what they stand beside in others."""
    from titan_moe.checkpoint.manifest import TensorSpec, audit, refuse_other_adapters
    from titan_moe.checkpoint.run_tensors import RunTensors
    from titan_moe.checkpoint.tensors import MODEL
    from titan_moe.models.decoder import ADAPTER
    from titan_moe.models.lora import empty_model
    from titan_moe.models.trained import freeze

    if "model" in found.excluded:
        return
    refuse_other_adapters(found.manifest, found.path, job.model_dump(mode="json"), is_own=is_own)
    empty = empty_model(model, job.lora)
    freeze(empty, job.training, job.lora)
    stored, wanted = found.manifest.tensors, {}
    tensors = RunTensors([empty], None, model, job.lora.model_dump())
    in_base = tensors.base_names
    for name, tensor in tensors.model().items():
        if name in in_base if is_own else ADAPTER in name and name not in stored:
            continue
        spec = stored.get(name)
        # Some tensors have a type of their own in any model, and base weights are converted.
        as_stored = spec is not None and (spec.dtype in ("float32", "int64") or name in in_base)
        dtype = spec.dtype if spec is not None and as_stored else job.training.dtype
        wanted[name] = TensorSpec(tuple(tensor.shape), dtype)
    if problems := audit(found.manifest, wanted, [MODEL]):
        of = found.manifest.job.get("model", {})
        raise RunError(
            f"{found.path} does not fit the model: {'; '.join(problems)}; it is of model.name="
            f"{of.get('name')}, model.flavor={of.get('flavor')}: set these, or name another"
        )


def _check_frozen(job: JobConfig, model: ModelConfig, found: "Found") -> None:
    """Raises RunError for moments of other parameters than those that train."""
    from titan_moe.models.lora import empty_model
    from titan_moe.models.trained import trained

    had = found.manifest.job.get("training", {}).get("freeze", [])
    if found.model_only or "optimizer" in found.excluded or had == job.training.freeze:
        return
    names = [name for name, _ in empty_model(model, job.lora).named_parameters()]
    before, now = (
        trained(names, model, job.training.model_copy(update={"freeze": freeze}), job.lora)
        for freeze in (had, job.training.freeze)
    )
    if before != now:
        raise RunError(
            f"training.freeze={job.training.freeze}, and {found.path} is of a run with {had}: set "
            'it to that, or begin its moments anew: checkpoint.exclude_from_loading=["optimizer"]'
        )


def _check_data(job: JobConfig, found: "Found") -> None:
    """Raises RunError for a data position that is of other data. Data on the hub is not opened."""
    from titan_moe.checkpoint.train_state import DATA, read_train_state
    from titan_moe.data.build import build_reader
    from titan_moe.data.check import on_the_hub
    from titan_moe.data.tokenizer import load_tokenizer

    if found.model_only or "dataloader" in found.excluded:
        return
    begun = 0 if "train_state" in found.excluded else found.manifest.step
    now = job_of_step(job, begun + 1)
    if on_the_hub(now.training, now.validation):
        return
    tokenizer, seed = load_tokenizer(job.model.tokenizer_path, now.training), job.debug.seed
    reader = build_reader(now.training, tokenizer, seed=seed, validation=now.validation)
    continue_data(job, read_train_state(found.path)[DATA], reader.identity)


def continue_data(job: JobConfig, state: dict[str, Any], identity: "Identity") -> dict[str, Any]:
    """Returns a checkpoint's data position for a loader of `identity`. RunError if it is one of
    other data, or of a stage that the run did not have at that step."""
    from titan_moe.data.loader import continue_state

    taken = job_of_step(job, state["step"]).training
    size, length = taken.global_batch_size, taken.seq_len
    saved = replace(identity, global_batch_size=size, seq_len=length)
    return continue_state(state, saved, identity)
