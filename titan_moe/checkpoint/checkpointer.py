"""Saving and loading a run.

<dump_folder>/<checkpoint.folder>/step-N/
    *.distcp            tensors, by torch.distributed.checkpoint: readable in any layout
    .metadata           DCP's index of the tensors
    train_state.json    step, data position, random states (not if model only)
    manifest.json       what the above holds, with a checksum per tensor and a digest per file, and
                        who wrote it

Each rank writes its *.distcp, rank 0 the other files.

A model with adapters saves the adapters, their moments and the routers' buffers. Only its seed
checkpoint holds the base weights too. Others have a digest of them, and a run loads them again.

Every save takes one path: checksums, DCP's writer (tensors.py), and the manifest at the end. With
checkpoint.async_mode the tensors are copied and DCP does the rest in a thread of each rank.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from titan_moe.checkpoint import folder as folders
from titan_moe.checkpoint.checksums import checksums, joint_digest, unlike_copies
from titan_moe.checkpoint.folder import find_checkpoint
from titan_moe.checkpoint.hf.peft import load_adapters
from titan_moe.checkpoint.hf.read import load_hf
from titan_moe.checkpoint.hf.write import export_checkpoint
from titan_moe.checkpoint.manifest import (
    Manifest,
    audit,
    compare_checksums,
    gather_specs,
    read_manifest,
    refuse_other_adapters,
)
from titan_moe.checkpoint.saves import Save, Stager, publish
from titan_moe.checkpoint.tensors import (
    MODEL,
    OPTIMIZER,
    FolderWriter,
    SavePlanner,
    base_names,
    held_chunks,
    local_tensors,
    model_tensors,
    optimizer_tensors,
    read_tensors,
)
from titan_moe.checkpoint.train_state import (
    DATA,
    MergeData,
    gather_rank_states,
    read_train_state,
    restore_random_state,
    write_train_state,
)
from titan_moe.comm.process import set_timeout
from titan_moe.config.job_config import Checkpoint
from titan_moe.distributed.agreement import control_group, lowest, on_rank_zero
from titan_moe.distributed.dtensor import local_part
from titan_moe.models.decoder import ADAPTER
from titan_moe.models.hf import HFModel, as_record
from titan_moe.models.hf_settings import TextFormat
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import step_folder

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and loads one model, its optimizer and the state of its run.

    `save`, `maybe_save` and `load` are collective: every rank calls them together, and when one
    fails, all raise the same one-line RunError. `torch.distributed` must be initialised, also for a
    single process.

    Args:
        config: the [checkpoint] table.
        dump_folder: job.dump_folder.
        modules: the model, or this rank's parts of it; their state_dicts name the tensors.
            Parameters may be DTensors of any mesh.
        optimizer: None where there is none to save or load (evaluation, conversion).
        job_record: the resolved configuration as JSON, kept in the manifest.
        merge_data: makes one data position of the ranks' own, which may overlap.
        model: family and dimensions, kept in the manifest; needed for Hugging Face folders.
    """

    def __init__(
        self,
        config: Checkpoint,
        dump_folder: Path,
        *,
        modules: Sequence[nn.Module],
        optimizer: Optimizer | None,
        job_record: dict[str, Any],
        merge_data: MergeData,
        model: HFModel | None = None,
    ) -> None:
        self._config = config
        self.folder = dump_folder / config.folder
        """Folder of the run's own checkpoints."""
        self._modules = modules
        self._optimizer = optimizer
        self.job_record = job_record
        self._merge_data = merge_data
        self._model = model
        self._group = control_group()
        set_timeout(config.save_timeout_seconds, self._group)
        if config.async_mode != "disabled":
            # Ranks use the other group between steps, while a thread uses this one.
            self._group = control_group("writes checkpoints")
            set_timeout(config.save_timeout_seconds, self._group)
        pinned = torch.cuda.is_available() and config.async_mode == "async_with_pinned_mem"
        self._stager = Stager(pinned=pinned)
        lora = {} if config.create_seed_checkpoint else job_record.get("lora", {})
        self._base_names = base_names(modules, lora)
        self._base: str | None = None
        self._save: Save | None = None
        self.last_step: int | None = None
        """Step of the checkpoint last loaded or saved in the run's own folder, on every rank."""
        self.loaded_job: dict[str, Any] = {}
        """The configuration that saved the checkpoint last loaded."""
        self.texts = TextFormat()  # Kept in the manifest; `load` takes the checkpoint's.

    def maybe_save(self, step: int, state: dict[str, Any], *, last: bool = False) -> bool:
        """Save if the configuration wants a checkpoint after this step; returns whether it did.

        With checkpoint.async_mode only the last save is complete then. Raises RunError on all ranks
        when a save has failed, or the one before in the background: call it after every step.
        """
        config = self._config
        if not config.enable or config.load_only:
            return False
        if self._save is not None and lowest(self._save.future.done()):
            self.finish()
        first = config.enable_first_step_checkpoint and step == 1
        if not (last or first or step % config.interval == 0):
            return False
        self.save(step, state, last=last, wait=last or config.async_mode == "disabled")
        if last and config.last_save_in_hf:
            self.export(step)
        return True

    def save(
        self, step: int, state: dict[str, Any], *, last: bool = False, wait: bool = True
    ) -> None:
        """Write the checkpoint of `step`, in place of an older one, then remove outdated ones.
        A save in the background is finished first.

        `state` is this rank's and JSON-able. Under "data" is the rank's own data position; the rest
        is the same on all ranks. Random states are added here. A seed checkpoint, and the last one
        if so configured, hold the model only.

        Args:
            wait: for all of it; else only until the tensors are copied.

        Raises RunError when it cannot be written; earlier checkpoints are then as they were. Raises
        RunError before anything is written when replicas of a tensor, or copies of one, differ.
        """
        if self._save is not None:
            began = time.perf_counter()
            self.finish()
            waited = time.perf_counter() - began
            self._say("step %d waited %.1f s for the save before it", step, waited)
        began = time.perf_counter()
        model_only = self._config.create_seed_checkpoint or (
            last and self._config.last_save_model_only
        )
        target = step_folder(self.folder, step)
        tensors = self._tensors(with_optimizer=not model_only)
        specs, sums, base = gather_specs(tensors), self._checksums(tensors), self._base_digest()
        states = [] if model_only else gather_rank_states(state)

        def publish_all(names: set[str]) -> None:
            if states:
                write_train_state(aside, states, self._merge_data)
            of = self._model
            model = (of.family, as_record(of.config)) if of else ("", {})
            more: dict[str, Any] = {"base": base, "texts": self.texts}
            manifest = Manifest(step, model_only, specs, sums, self.job_record, *model, **more)
            publish(aside, target, manifest, names, self._config.keep_latest_k)

        doing = f"cannot save checkpoint {target}"
        aside = on_rank_zero(lambda: folders.begin(target), doing=doing)
        # A thread beside training leaves the GPU alone.
        writer = FolderWriter(aside, publish_all, copy_ahead=10_000_000 if wait else 0)
        planner = SavePlanner(held_chunks(tensors))
        how: dict[str, Any] = {"planner": planner, "process_group": self._group}
        how |= {"state_dict": local_tensors(tensors), "storage_writer": writer}
        if wait:
            future = Future[Any]()
            try:
                future.set_result(dcp.save(**how))
            except CheckpointException as error:
                future.set_exception(error)
            self._end(Save(step, target, aside, began, future))
        else:
            begun = dcp.async_save(async_stager=self._stager, **how)
            assert isinstance(begun, Future), "tensors are copied when async_save returns"
            self._save = Save(step, target, aside, began, begun)
            took = time.perf_counter() - began
            self._say("saving %s in the background; the step waited %.2f s", target, took)

    def finish(self) -> int | None:
        """Wait for the save in the background, if there is one; returns `last_step`. Raises
        RunError on all ranks when it has failed. Collective."""
        if self._save is not None:
            save, self._save = self._save, None
            self._end(save)
        return self.last_step

    def _checksums(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Returns checksums by name. Raises RunError on all ranks when replicas of a tensor, or
        copies of a tied weight, differ. Collective."""
        sums = checksums(tensors)
        if self._model and (problems := unlike_copies(self._model.config, sums)):
            raise RunError("; ".join(problems))
        return sums

    def check_replicas(self, step: int) -> None:
        """Compare the replicas of parameters, router biases and optimizer state, and the copies of
        tied weights; collective.

        Replicas are updated by the same kernels from the same sums, so they stay equal to the bit.
        A difference shows a processor or a memory that errs without a word, or a bug. A layout that
        shards everything has nothing to compare.

        Raises RunError naming tensors and ranks that differ.
        """
        try:
            self._checksums(self._tensors(with_optimizer=True))
        except RunError as error:
            raise RunError(f"after step {step} {error}") from None

    def _end(self, save: Save) -> None:
        """Wait until a save has ended on every rank; collective."""
        save.wait(self._config.save_timeout_seconds)
        self.last_step = save.step
        self._say("saved %s in %.1f s", save.target, time.perf_counter() - save.began)

    def _say(self, line: str, *values: object) -> None:
        if dist.get_rank() == 0:
            logger.info(line, *values)

    def export(self, step: int) -> None:
        """Write the model in the checkpoint of `step` as a Hugging Face folder beside it;
        collective. Raises RunError when it cannot be written; nothing is left then."""
        source = step_folder(self.folder, step)
        target = folders.hf_folder(self.folder, step)
        dtype = getattr(torch, self._config.export_dtype)
        self._say("%s", export_checkpoint(source, target, dtype))

    def check_export(self, last_step: int, *, finished: bool = False) -> None:
        """Raises RunError when the export after the last step would find its folder taken; of a
        finished run, makes the one that a kill or a failure has left out. Collective."""
        if not (self._config.enable and self._config.last_save_in_hf):
            return
        target = folders.hf_folder(self.folder, last_step)
        doing = f"cannot export to {target}"
        if not finished:
            on_rank_zero(lambda: folders.refuse_existing(target), doing=doing)
        elif not on_rank_zero(target.exists, doing=doing):
            self.export(last_step)

    def load(self) -> dict[str, Any] | None:
        """Load the run's own checkpoint, else `initial_load_path`; into the tensors, in place.

        The run's own is that of `load_step`, or the latest. Returns the saved state, with
        the merged "data" and without the parts excluded from loading; None when there is nothing to
        go on from: no checkpoint, or one of the model only. Random states are put back where the
        number of ranks is the same, so call this last before the loop.

        Raises RunError when it is missing, damaged or of another model: tensors are undefined then.
        """
        doing = f"cannot load a checkpoint from {self.folder}"
        found = on_rank_zero(lambda: find_checkpoint(self._config, self.folder), doing=doing)
        if found is None:
            if self._config.enable and self._config.initial_load_in_hf:
                self._load_hf()
            load_adapters(self._model, self.job_record, model_tensors(self._modules))
            return None
        source, manifest, model_only, excluded = found
        self.loaded_job, self.texts = manifest.job, manifest.texts
        is_own = source.parent == self.folder
        refuse_other_adapters(manifest, source, self.job_record, is_own=is_own)
        if is_own and self._base_names:
            self._load_base(manifest)
        parts = [MODEL] * ("model" not in excluded)
        if self._optimizer is not None and not model_only and "optimizer" not in excluded:
            parts.append(OPTIMIZER)
        self._load_tensors(source, manifest, parts, base=not is_own)
        self._say("loaded %s%s", source, found.remark)
        if not is_own:
            load_adapters(self._model, self.job_record, model_tensors(self._modules))
        else:
            if self._config.initial_load_path and not self._base_names and dist.get_rank() == 0:
                logger.warning(
                    "checkpoint.initial_load_path is not used: %s has checkpoints", self.folder
                )
            self.last_step = step = manifest.step
            if not self._config.load_only:
                on_rank_zero(lambda: folders.set_aside_later(self.folder, step), doing=doing)
        if model_only:
            return None
        doing = f"cannot load checkpoint {source}"
        saved = on_rank_zero(lambda: read_train_state(source), doing=doing)
        state: dict[str, Any] = {}
        if "train_state" not in excluded:
            state |= saved["common"]
            restore_random_state(saved)
        if "dataloader" not in excluded:
            state[DATA] = saved[DATA]
        return state

    def _load_base(self, manifest: Manifest) -> None:
        """Load the weights that the adapters of a checkpoint of this run stand beside. Raises
        RunError where they are not those that it was saved with."""
        initial = self._config.initial_load_path
        if self._config.initial_load_in_hf:
            self._load_hf()
        elif initial is not None:
            doing = f"cannot load {initial}"
            base = on_rank_zero(lambda: read_manifest(Path(initial)), doing=doing)
            refuse_other_adapters(base, Path(initial), self.job_record, is_own=False)
            self._load_tensors(Path(initial), base, [MODEL], base=True)
        if self._base_digest() != manifest.base:
            raise RunError(
                f"{self.folder} has adapters of other weights than those that were loaded from "
                f"{initial or self.job_record['model']['hf_assets_path'] or 'debug.seed'}: name "
                "the model that they were trained on (checkpoint.initial_load_path)"
            )

    def _as_stored(self, tensors: Mapping[str, Tensor], manifest: Manifest) -> dict[str, Tensor]:
        """Returns tensors to read base weights into, in the types of the checkpoint, which may be
        wider: copies as large as this rank's part."""
        found = tensors.keys() & self._base_names & manifest.tensors.keys()
        types = {name: getattr(torch, manifest.tensors[name].dtype) for name in found}
        return {name: torch.empty_like(tensors[name], dtype=types[name]) for name in found}

    def _base_digest(self) -> str:
        """Returns a digest of the base weights; empty where there are none. Collective, once."""
        if self._base is None:
            named = model_tensors(self._modules)
            self._base = joint_digest(checksums({n: named[n] for n in sorted(self._base_names)}))
        return self._base

    def _tensors(self, *, with_optimizer: bool, base: Manifest | None = None) -> dict[str, Tensor]:
        """Returns the tensors that a checkpoint of this run holds. Given `base`, the manifest of
        another run's, returns the tensors to load from it: all but the adapters that it lacks."""
        named, left_out = model_tensors(self._modules), self._base_names
        if base is not None:
            left_out = {n for n in named if ADAPTER in n and n not in base.tensors}
        tensors = {name: named[name] for name in named if name not in left_out}
        if with_optimizer and self._optimizer is not None:
            tensors |= optimizer_tensors(self._modules, self._optimizer)
        return tensors

    def _load_hf(self) -> None:
        if "model" in self._config.exclude_from_loading:
            return
        assert self._model is not None, "Hugging Face folders want a family and dimensions"
        folder = self._config.initial_load_path or self.job_record["model"]["hf_assets_path"]
        named = model_tensors(self._modules).items()
        tensors = {name.removeprefix(MODEL): tensor for name, tensor in named}
        load_hf(Path(folder), self._model, tensors)

    def _load_tensors(
        self, source: Path, manifest: Manifest, parts: list[str], *, base: bool
    ) -> None:
        """Load parts of a checkpoint. `base`: it is another run's, and this run begins with it."""
        named = self._tensors(with_optimizer=OPTIMIZER in parts, base=manifest if base else None)
        own = {name: tensor for name, tensor in named.items() if name.startswith(tuple(parts))}
        tensors = own | (self._as_stored(own, manifest) if base else {})
        specs = gather_specs(tensors)
        if problems := audit(manifest, specs, parts):
            raise RunError(f"checkpoint {source} does not fit the model: {'; '.join(problems)}")
        read_tensors(tensors, source)
        sums = checksums(tensors)
        if damaged := compare_checksums(manifest, sums):
            raise RunError(
                f"checkpoint {source} is damaged: wrong checksum of {', '.join(damaged)}; "
                "an earlier one can be chosen with checkpoint.load_step"
            )
        # A model that does not tie these weights has parameters of the same names.
        tied = self._model.config if self._model and MODEL in parts else None
        if tied and (problems := unlike_copies(tied, sums)):
            raise RunError(f"checkpoint {source} does not fit the model: {'; '.join(problems)}")
        for name in tensors.keys() & self._base_names:
            local_part(own[name]).copy_(local_part(tensors[name]))
