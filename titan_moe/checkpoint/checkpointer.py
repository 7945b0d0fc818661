"""Saving and loading a run.

<dump_folder>/<checkpoint.folder>/step-N/
    .metadata, *.distcp     tensors, by torch.distributed.checkpoint: readable in any layout
    train_state.json        step, data position, random states (not if model only)
    manifest.json           what the above holds, with a checksum per tensor, and who wrote it
    SHA256SUMS              a digest of every file
"""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_moe.checkpoint import storage
from titan_moe.checkpoint.background import BackgroundSaves
from titan_moe.checkpoint.box_sums import unlike_copies
from titan_moe.checkpoint.checksum import checksums
from titan_moe.checkpoint.digests import DIGESTS
from titan_moe.checkpoint.find import find_checkpoint
from titan_moe.checkpoint.hf.transfer import load_hf, save_hf
from titan_moe.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    TensorSpec,
    audit,
    code_version,
    compare_checksums,
    gather_specs,
)
from titan_moe.checkpoint.read_tensors import read_tensors
from titan_moe.checkpoint.replicas import tied_names
from titan_moe.checkpoint.safe_reader import SafeReader
from titan_moe.checkpoint.shared_folder import check_complete, write_digests
from titan_moe.checkpoint.tensor_files import own_files, write_tensors
from titan_moe.checkpoint.tensors import MODEL, OPTIMIZER, model_tensors, optimizer_tensors
from titan_moe.checkpoint.train_state import (
    DATA,
    RNG,
    TRAIN_STATE,
    MergeData,
    gather_rank_states,
    merge_rank_states,
    read_train_state,
    restore_random_state,
)
from titan_moe.checkpoint.writer import Finish
from titan_moe.config.job_config import Checkpoint
from titan_moe.distributed.agreement import on_every_rank, on_rank_zero, set_longest_wait
from titan_moe.models.hf import HFModel, as_record
from titan_moe.runtime.errors import RunError

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
        num_experts: routed experts per MoE layer; checked at load.
        job_record: the resolved configuration as JSON, kept in the manifest.
        merge_data: makes one data position of the ranks' own, which may overlap.
        model: family and dimensions, kept in the manifest; needed for Hugging Face folders.
    """

    background_saves: type[BackgroundSaves] = BackgroundSaves

    def __init__(
        self,
        config: Checkpoint,
        dump_folder: Path,
        *,
        modules: Sequence[nn.Module],
        optimizer: Optimizer | None,
        num_experts: int,
        job_record: dict[str, Any],
        merge_data: MergeData,
        model: HFModel | None = None,
    ) -> None:
        self._config = config
        set_longest_wait(config.save_timeout_seconds)
        self._folder = dump_folder / config.folder
        self._modules = modules
        self._optimizer = optimizer
        self._num_experts = num_experts
        self._job_record = job_record
        self._merge_data = merge_data
        self._model = model
        self._background: BackgroundSaves | None = None
        self.last_step: int | None = None
        """Step of the checkpoint last loaded or saved in the run's own folder, on every rank."""
        self.loaded_job: dict[str, Any] = {}
        """The configuration that saved the checkpoint last loaded."""
        self.longest_save = 0.0
        """Seconds of the longest save, from its beginning until it was seen to be complete."""

    @property
    def folder(self) -> Path:
        """Folder of the run's own checkpoints."""
        return self._folder

    def maybe_save(self, step: int, state: dict[str, Any], *, last: bool = False) -> bool:
        """Save if the configuration wants a checkpoint after this step; returns whether it did.

        With checkpoint.async_mode only the last save is complete then. Raises RunError on all ranks
        when a save has failed, or the one before in the background: call it after every step.
        """
        config = self._config
        if not config.enable or config.load_only:
            return False
        in_background = config.async_mode != "disabled" and not last
        if in_background:
            self._hear_of_background()
        if not (last or self._is_due(step)):
            return False
        if in_background:
            self._save_in_background(step, state)
        else:
            self.save(step, state, last=last)
        if last and config.last_save_in_hf:
            self.export(step)
        return True

    def pending(self, step: int) -> bool:
        """Whether a save is under way, or due after `step`."""
        under_way = self._background is not None and self._background.busy
        return under_way or self._is_due(step)

    def _is_due(self, step: int) -> bool:
        first = self._config.enable_first_step_checkpoint and step == 1
        return first or step % self._config.interval == 0

    def finish(self) -> int | None:
        """Wait for the save in the background, if there is one; returns `last_step`. Raises
        RunError on all ranks when it has failed. Collective."""
        if self._background is not None:
            try:
                self._note(self._background, self._background.wait())
            finally:
                self._background.close()
                self._background = None
        return self.last_step

    def save(self, step: int, state: dict[str, Any], *, last: bool = False) -> None:
        """Write the checkpoint of `step`, in place of an older one, then remove outdated ones; one
        in the background is finished first.

        `state` is this rank's and JSON-able. Under "data" is the rank's own data position; the rest
        is the same on all ranks. Random states are added here. A seed checkpoint, and the last one
        if so configured, hold the model only.

        Raises RunError when it cannot be written; earlier checkpoints are then as they were. Raises
        RunError before anything is written when replicas of a tensor, or copies of one, differ.
        """
        self.finish()
        started = time.perf_counter()
        model_only = self._config.create_seed_checkpoint or (
            last and self._config.last_save_model_only
        )
        target = storage.step_folder(self._folder, step)
        doing = f"cannot save checkpoint {target}"
        tensors = self._tensors(with_optimizer=not model_only)
        specs = gather_specs(tensors)
        sums = checksums(tensors, {name: spec.shape for name, spec in specs.items()})
        if problems := unlike_copies(self._copies(), sums):
            raise RunError("; ".join(problems))
        rank_states = [] if model_only else gather_rank_states(state)

        def describe() -> None:
            check_complete(aside)
            if not model_only:
                train_state = merge_rank_states(rank_states, self._merge_data)
                storage.write_json(aside / TRAIN_STATE, train_state)
            manifest = self._manifest(step, model_only, specs) | {"checksums": sums}
            storage.write_json(aside / MANIFEST, manifest)

        aside = on_rank_zero(lambda: storage.begin(target), doing=doing)
        try:
            write_tensors(tensors, aside, doing=doing)
            on_rank_zero(describe, doing=doing)
            write_digests(aside, own_files(aside), doing=doing)
            on_rank_zero(lambda: storage.commit(aside, target), doing=doing)
        except Exception:
            if dist.get_rank() == 0:
                storage.abandon(aside)
            raise
        count = self._config.keep_latest_k
        on_rank_zero(
            lambda: storage.keep_latest(self._folder, count=count, newest=step),
            doing=f"after saving {target}",
        )
        self.last_step = step
        took = time.perf_counter() - started
        self.longest_save = max(self.longest_save, took)
        if dist.get_rank() == 0:
            logger.info("saved %s in %.1f s", target, took)

    def _save_in_background(self, step: int, state: dict[str, Any]) -> None:
        """Copy the state of `step`, and let it be written."""
        started = time.perf_counter()
        background = self._background
        assert background is not None
        if background.busy:
            self._note(background, background.wait())
            if dist.get_rank() == 0:
                waited = time.perf_counter() - started
                logger.info("step %d waited %.1f s for the save before it", step, waited)
        target = storage.step_folder(self._folder, step)
        rank_states, described = gather_rank_states(state), {}

        def begin() -> Path:
            described["manifest"] = self._manifest(step, False, background.specs)
            described["train_state"] = merge_rank_states(rank_states, self._merge_data)
            return storage.begin(target)

        aside = on_rank_zero(begin, doing=f"cannot save checkpoint {target}")
        what = Finish(
            aside=aside,
            target=target,
            manifest=described.get("manifest", {}),
            train_state=described.get("train_state", {}),
            step=step,
            keep_latest_k=self._config.keep_latest_k,
        )
        background.begin(self._tensors(with_optimizer=True), what)
        if dist.get_rank() == 0:
            waited = time.perf_counter() - started
            logger.info("saving %s in the background; the step waited %.2f s", target, waited)

    def _hear_of_background(self) -> None:
        if self._background is not None:
            self._note(self._background, self._background.poll())
            return
        # After the first step: the process starts, and memory is found, before the first save.
        tensors = self._tensors(with_optimizer=True)
        self._background = self.background_saves(tensors, self._copies(), self._config)

    def _note(self, background: BackgroundSaves, saved: int | None) -> None:
        self.longest_save = max(self.longest_save, background.seconds)
        if saved is not None:
            self.last_step = saved

    def _manifest(
        self, step: int, model_only: bool, specs: Mapping[str, TensorSpec]
    ) -> dict[str, Any]:
        """Without checksums."""
        manifest = Manifest(
            step=step,
            model_only=model_only,
            num_experts=self._num_experts,
            tensors=dict(specs),
            checksums={},
            job=self._job_record,
            code=code_version(),
            family=self._model.family if self._model else "",
            model=as_record(self._model.config) if self._model else {},
            digests=DIGESTS,
        )
        return manifest.model_dump(mode="json")

    def export(self, step: int) -> None:
        """Write the model as a Hugging Face folder beside the checkpoint of `step`; collective.
        Raises RunError when it cannot be written; nothing is left then."""
        tensors, shapes = self._model_tensors()
        save_hf(
            storage.hf_folder(self._folder, step),
            self._hf_model(),
            tensors,
            shapes,
            dtype=getattr(torch, self._config.export_dtype),
            job_record=self._job_record,
        )

    def check_export(self, last_step: int, *, finished: bool = False) -> None:
        """Raises RunError when the export after the last step would find its folder taken; of a
        finished run, makes the one that a kill or a failure has left out. Collective."""
        if not (self._config.enable and self._config.last_save_in_hf):
            return
        target = storage.hf_folder(self._folder, last_step)
        doing = f"cannot export to {target}"
        if not finished:
            on_rank_zero(lambda: storage.refuse_existing(target), doing=doing)
        elif not on_rank_zero(target.exists, doing=doing):
            self.export(last_step)

    def load(self, step: int | None = None) -> dict[str, Any] | None:
        """Load the run's own checkpoint, else `initial_load_path`; into the tensors, in place.

        The own one is that of `step`, of `load_step`, or the latest. Returns the saved state, with
        the merged "data" and without the parts excluded from loading; None when there is nothing to
        go on from: no checkpoint, or one of the model only. Random states are put back where the
        number of ranks is the same, so call this last before the loop.

        Raises RunError when it is missing, damaged or of another model: tensors are undefined then.
        """
        doing = f"cannot load a checkpoint from {self._folder}"
        found = on_rank_zero(lambda: find_checkpoint(self._config, self._folder, step), doing=doing)
        if found is None:
            if self._config.enable and self._config.initial_load_in_hf:
                self._load_hf()
            return None
        source, manifest, model_only, excluded = found
        self.loaded_job = manifest.job
        parts = [MODEL] * ("model" not in excluded)
        if self._optimizer is not None and not model_only and "optimizer" not in excluded:
            parts.append(OPTIMIZER)
        self._load_tensors(source, manifest, parts)
        if dist.get_rank() == 0:
            logger.info("loaded %s%s", source, found.remark)
        if source.parent == self._folder:
            if self._config.initial_load_path is not None and dist.get_rank() == 0:
                logger.warning(
                    "checkpoint.initial_load_path is not used: %s has checkpoints", self._folder
                )
            self.last_step = manifest.step
            if not self._config.load_only:
                on_rank_zero(lambda: self._set_aside_later(manifest.step), doing=doing)
        if model_only:
            return None
        return self._load_train_state(source, manifest.step, excluded)

    def _tensors(self, *, with_optimizer: bool) -> dict[str, Tensor]:
        tensors = model_tensors(self._modules)
        if with_optimizer and self._optimizer is not None:
            tensors |= optimizer_tensors(self._modules, self._optimizer)
        return tensors

    def _load_hf(self) -> None:
        folder = self._config.initial_load_path or self._job_record["model"]["hf_assets_path"]
        if MODEL.rstrip(".") not in self._config.exclude_from_loading:
            load_hf(Path(folder).expanduser(), self._hf_model(), *self._model_tensors())

    def _hf_model(self) -> HFModel:
        assert self._model is not None, "Hugging Face folders want a family and dimensions"
        return self._model

    def _model_tensors(self) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
        """This rank's tensors of the model and the shapes of all ranks', by our names."""
        tensors = {
            name.removeprefix(MODEL): tensor
            for name, tensor in model_tensors(self._modules).items()
        }
        return tensors, {name: spec.shape for name, spec in gather_specs(tensors).items()}

    def _copies(self) -> list[list[str]]:
        return tied_names(self._model.config) if self._model else []

    def _set_aside_later(self, step: int) -> None:
        for kept in storage.set_aside_later(self._folder, step):
            logger.warning("a later step is left behind, kept as %s", kept)

    def _load_tensors(self, source: Path, manifest: Manifest, parts: list[str]) -> None:
        tensors = {
            name: tensor
            for name, tensor in self._tensors(with_optimizer=OPTIMIZER in parts).items()
            if name.startswith(tuple(parts))
        }
        specs = gather_specs(tensors)
        if problems := audit(manifest, specs, parts, self._num_experts):
            raise RunError(f"checkpoint {source} does not fit the model: {'; '.join(problems)}")
        doing = f"cannot load checkpoint {source}"
        reader = on_every_rank(lambda: SafeReader(source), doing=doing)
        read_tensors(tensors, reader, doing=doing)
        found = checksums(tensors, {name: spec.shape for name, spec in specs.items()})
        if damaged := compare_checksums(manifest, found):
            raise RunError(
                f"checkpoint {source} is damaged: wrong checksum of {', '.join(damaged)}; "
                "an earlier one can be chosen with checkpoint.load_step"
            )
        # A model that does not tie these weights has parameters of the same names.
        if MODEL in parts and (problems := unlike_copies(self._copies(), found)):
            raise RunError(f"checkpoint {source} does not fit the model: {'; '.join(problems)}")

    def _load_train_state(self, source: Path, step: int, without: frozenset[str]) -> dict[str, Any]:
        doing = f"cannot load checkpoint {source}"
        saved = on_rank_zero(lambda: read_train_state(source, step), doing=doing)
        state: dict[str, Any] = {}
        if "train_state" not in without:
            state |= saved["common"]
            if not restore_random_state(saved) and dist.get_rank() == 0:
                saved_by = len(saved[RNG])
                logger.info("random states start fresh: %d ranks saved theirs", saved_by)
        if "dataloader" not in without:
            state[DATA] = saved[DATA]
        return state
