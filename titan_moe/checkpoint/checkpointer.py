"""Saving and loading a run.

<dump_folder>/<checkpoint.folder>/step-N/
    *.distcp            tensors, by torch.distributed.checkpoint: readable in any layout
    .metadata           DCP's index of the tensors
    train_state.json    step, data position (not if model only)
    manifest.json       what the above holds, with a checksum per tensor and a digest per file, and
                        who wrote it

Each rank writes its *.distcp, rank 0 the other files.

A model with adapters saves the adapters, their moments and the routers' buffers. Only its seed
checkpoint holds the base weights too. Others have a digest of them, and a run loads them again.

Every save takes one path: checksums, DCP's writer (tensors.py), and the manifest at the end. With
checkpoint.async_mode the tensors are copied and DCP does the rest in a thread of each rank.
"""

import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from titan_moe.checkpoint import folder as folders
from titan_moe.checkpoint.hf.write import export_checkpoint
from titan_moe.checkpoint.load import Loader
from titan_moe.checkpoint.manifest import Manifest, gather_specs
from titan_moe.checkpoint.run_tensors import RunTensors
from titan_moe.checkpoint.tensors import (
    FolderWriter,
    SavePlanner,
    Stager,
    held_chunks,
    local_tensors,
    one_line,
)
from titan_moe.checkpoint.train_state import MergeData, write_train_state
from titan_moe.comm.process import set_timeout
from titan_moe.config.job_config import Checkpoint
from titan_moe.distributed.agreement import (
    control_group,
    from_every_rank,
    lowest,
    on_every_rank,
    on_rank_zero,
)
from titan_moe.models.hf import HFModel, as_record
from titan_moe.models.hf_settings import TextFormat
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import step_folder
from titan_moe.runtime.log import log_on_rank_zero


class Save(NamedTuple):
    """A save that DCP has begun."""

    step: int
    target: Path
    aside: Path
    """The folder that becomes `target`."""
    began: float
    """The start, on the clock of time.perf_counter."""
    future: Future[Any]


@dataclass
class Checkpointer:
    """Saves and loads one model, its optimizer and the state of its run.

    `save`, `maybe_save` and `load` are collective: every rank calls them together, and when one
    fails, all raise the same one-line RunError. `torch.distributed` must be initialised, also for a
    single process.
    """

    config: Checkpoint
    """The [checkpoint] table."""
    dump_folder: Path
    """job.dump_folder."""
    modules: Sequence[nn.Module]
    """The model, or this rank's parts of it; their state_dicts name the tensors. Parameters may be
    DTensors of any mesh."""
    optimizer: Optimizer | None
    """None where there is none to save or load (evaluation, conversion)."""
    job_record: dict[str, Any]
    """The resolved configuration as JSON, kept in the manifest."""
    merge_data: MergeData
    """Makes one data position of the ranks' own, which may overlap."""
    model: HFModel
    """Family and dimensions, kept in the manifest."""

    def __post_init__(self) -> None:
        config = self.config
        self.folder = self.dump_folder / config.folder
        """Folder of the run's own checkpoints."""
        self._group = control_group()
        set_timeout(config.save_timeout_seconds, self._group)
        if config.async_mode != "disabled":
            # Ranks use the other group between steps, while a thread uses this one.
            self._group = control_group("writes checkpoints")
            set_timeout(config.save_timeout_seconds, self._group)
        pinned = torch.cuda.is_available() and config.async_mode == "async_with_pinned_mem"
        self._stager = Stager(pinned=pinned)
        lora = {} if config.create_seed_checkpoint else self.job_record.get("lora", {})
        self._tensors = RunTensors(self.modules, self.optimizer, self.model.config, lora)
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
        config = self.config
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
        is the same on all ranks. A seed checkpoint, and the last one if so configured, hold the
        model only.

        Args:
            wait: for all of it; else only until the tensors are copied.

        Raises RunError when it cannot be written; earlier checkpoints are then as they were. Raises
        RunError before anything is written when replicas of a tensor, or copies of one, differ.
        """
        if self._save is not None:
            began = time.perf_counter()
            self.finish()
            waited = time.perf_counter() - began
            log_on_rank_zero("step %d waited %.1f s for the save before it", step, waited)
        began = time.perf_counter()
        model_only = self.config.create_seed_checkpoint or (
            last and self.config.last_save_model_only
        )
        target = step_folder(self.folder, step)
        tensors = self._tensors.saved_model()
        if not model_only:
            tensors |= self._tensors.optimizer_states()
        specs, sums = gather_specs(tensors), self._tensors.checksums(tensors)
        base = self._tensors.base_digest
        doing = f"cannot save checkpoint {target}"
        states = [] if model_only else from_every_rank(lambda: state, doing=doing)

        def publish_all(names: set[str]) -> None:
            if states:
                write_train_state(aside, states, self.merge_data)
            model = self.model.family, as_record(self.model.config)
            more: dict[str, Any] = {"base": base, "texts": self.texts}
            manifest = Manifest(step, model_only, specs, sums, self.job_record, *model, **more)
            folders.publish(aside, target, manifest, names, self.config.keep_latest_k)

        aside = on_rank_zero(lambda: folders.begin(target), doing=doing)
        # A thread beside training leaves the GPU alone.
        writer = FolderWriter(aside, publish_all, copy_ahead=10_000_000 if wait else 0)
        planner = SavePlanner(held_chunks(tensors))
        how: dict[str, Any] = {"planner": planner, "process_group": self._group}
        how |= {"state_dict": local_tensors(tensors), "storage_writer": writer}
        save = Save(step, target, aside, began, self._written(how, wait=wait))
        if wait:
            self._end(save)
        else:
            self._save = save
            took = time.perf_counter() - began
            log_on_rank_zero("saving %s in the background; the step waited %.2f s", target, took)

    def _written(self, how: dict[str, Any], *, wait: bool) -> Future[Any]:
        """Lets DCP write; with `wait`, the result is there."""
        if not wait:
            begun = dcp.async_save(async_stager=self._stager, **how)
            assert isinstance(begun, Future), "tensors are copied when async_save returns"
            return begun
        future = Future[Any]()
        try:
            future.set_result(dcp.save(**how))
        except CheckpointException as error:
            future.set_exception(error)
        return future

    def finish(self) -> int | None:
        """Wait for the save in the background, if there is one; returns `last_step`. Raises
        RunError on all ranks when it has failed. Collective."""
        if self._save is not None:
            save, self._save = self._save, None
            self._end(save)
        return self.last_step

    def check_replicas(self, step: int) -> None:
        """Compare the replicas of parameters, router biases and optimizer state, and the copies of
        tied weights; collective.

        Replicas are updated by the same kernels from the same sums, so they stay equal to the bit.
        A difference shows a processor or a memory that errs without a word, or a bug. A layout that
        shards everything has nothing to compare.

        Raises RunError naming tensors and ranks that differ.
        """
        try:
            tensors = self._tensors
            tensors.checksums(tensors.saved_model() | tensors.optimizer_states())
        except RunError as error:
            raise RunError(f"after step {step} {error}") from None

    def _end(self, save: Save) -> None:
        """Wait until a save has ended on every rank; collective. Raises RunError on all ranks when
        it has failed on one."""
        doing, limit = f"cannot save checkpoint {save.target}", self.config.save_timeout_seconds

        def wait() -> None:
            try:
                with one_line(doing):
                    save.future.result(limit)
            except TimeoutError:
                raise RunError(
                    f"{doing}: it is not on disk after checkpoint.save_timeout_seconds={limit}: "
                    "raise it if the disk is only slow"
                ) from None

        try:
            on_every_rank(wait, doing=doing)
        except Exception:
            # A thread that still writes could make it visible while it is removed.
            if dist.get_rank() == 0 and save.future.done():
                shutil.rmtree(save.aside, ignore_errors=True)
            raise
        self.last_step = save.step
        log_on_rank_zero("saved %s in %.1f s", save.target, time.perf_counter() - save.began)

    def export(self, step: int) -> None:
        """Write the model in the checkpoint of `step` as a Hugging Face folder beside it;
        collective. Raises RunError when it cannot be written; nothing is left then."""
        source = step_folder(self.folder, step)
        target = folders.hf_folder(self.folder, step)
        dtype = getattr(torch, self.config.export_dtype)
        log_on_rank_zero("%s", export_checkpoint(source, target, dtype))

    def check_export(self, last_step: int, *, finished: bool = False) -> None:
        """Raises RunError when the export after the last step would find its folder taken; of a
        finished run, makes the one that a kill or a failure has left out. Collective."""
        if not (self.config.enable and self.config.last_save_in_hf):
            return
        target = folders.hf_folder(self.folder, last_step)
        doing = f"cannot export to {target}"
        if not finished:
            on_rank_zero(lambda: folders.refuse_existing(target), doing=doing)
        elif not on_rank_zero(target.exists, doing=doing):
            self.export(last_step)

    def load(self) -> dict[str, Any] | None:
        """Load the run's own checkpoint, else `initial_load_path`; into the tensors, in place.

        Returns the saved state; None when there is nothing to go on from: no checkpoint, or one of
        the model only. Raises RunError as `Loader` does.
        """
        loader = Loader(self.config, self.folder, self._tensors, self.model, self.job_record)
        if (loaded := loader.load()) is None:
            return None
        found, state = loaded
        self.loaded_job, self.texts = found.manifest.job, found.manifest.texts
        if found.path.parent == self.folder:
            self.last_step = found.manifest.step
        return state
