"""Loads a checkpoint, or what a run begins with, into the tensors of a run, in place."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint import folder as folders
from titan_moe.checkpoint.checksums import checksums, unlike_copies
from titan_moe.checkpoint.folder import Found, find_checkpoint
from titan_moe.checkpoint.hf.peft import load_adapters
from titan_moe.checkpoint.hf.read import load_hf
from titan_moe.checkpoint.manifest import (
    Manifest,
    audit,
    compare_checksums,
    gather_specs,
    read_manifest,
    refuse_other_adapters,
)
from titan_moe.checkpoint.run_tensors import RunTensors
from titan_moe.checkpoint.tensors import MODEL, OPTIMIZER, read_tensors
from titan_moe.checkpoint.train_state import DATA, read_train_state
from titan_moe.config.job_config import Checkpoint
from titan_moe.distributed.agreement import on_rank_zero
from titan_moe.distributed.dtensor import local_part
from titan_moe.models.decoder import ADAPTER
from titan_moe.models.hf import HFModel
from titan_moe.runtime.errors import RunError

logger = logging.getLogger(__name__)


@dataclass
class Loader:
    """Loads what `checkpoint`, that table, asks for. Collective.

    Raises RunError on all ranks when a checkpoint is missing, damaged or of another model: tensors
    are undefined then.
    """

    checkpoint: Checkpoint
    folder: Path
    """Folder of the run's own checkpoints."""
    tensors: RunTensors
    model: HFModel
    job: Mapping[str, Any]
    """The resolved configuration."""

    def load(self) -> tuple[Found, dict[str, Any] | None] | None:
        """Loads the run's own checkpoint, of `load_step` or the latest, else `initial_load_path`;
        returns it, with the saved state unless the model only is loaded. None when there is none.

        The state has the merged "data", and lacks the parts excluded from loading.
        """
        doing = f"cannot load a checkpoint from {self.folder}"
        found = on_rank_zero(lambda: find_checkpoint(self.checkpoint, self.folder), doing=doing)
        is_own = found is not None and found.path.parent == self.folder
        if found is None:
            if self.checkpoint.enable and self.checkpoint.initial_load_in_hf:
                self._load_hf()
        else:
            self._load_found(found, is_own)
        if not is_own:
            load_adapters(self.model, self.job, self.tensors.model())
        if found is None:
            return None
        if is_own and not self.checkpoint.load_only:
            step = found.manifest.step
            on_rank_zero(lambda: folders.set_aside_later(self.folder, step), doing=doing)
        return found, None if found.model_only else _state(found)

    def _load_found(self, found: Found, is_own: bool) -> None:
        refuse_other_adapters(found.manifest, found.path, self.job, is_own=is_own)
        has_base = bool(self.tensors.base_names)
        if is_own and has_base:
            self._load_base(found.manifest)
        parts = [MODEL] * ("model" not in found.excluded)
        has_optimizer = self.tensors.optimizer is not None and not found.model_only
        if has_optimizer and "optimizer" not in found.excluded:
            parts.append(OPTIMIZER)
        self._load_tensors(found.path, found.manifest, parts, base=not is_own)
        if dist.get_rank() == 0:
            logger.info("loaded %s%s", found.path, found.remark)
            if is_own and not has_base and self.checkpoint.initial_load_path:
                logger.warning(
                    "checkpoint.initial_load_path is not used: %s has checkpoints", self.folder
                )

    def _load_base(self, manifest: Manifest) -> None:
        """Loads the weights that the adapters of a checkpoint of this run stand beside. Raises
        RunError where they are not those that it was saved with."""
        initial = self.checkpoint.initial_load_path
        if self.checkpoint.initial_load_in_hf:
            self._load_hf()
        elif initial is not None:
            doing = f"cannot load {initial}"
            base = on_rank_zero(lambda: read_manifest(Path(initial)), doing=doing)
            refuse_other_adapters(base, Path(initial), self.job, is_own=False)
            self._load_tensors(Path(initial), base, [MODEL], base=True)
        if self.tensors.base_digest != manifest.base:
            raise RunError(
                f"{self.folder} has adapters of other weights than those that were loaded from "
                f"{initial or self.job['model']['hf_assets_path'] or 'debug.seed'}: name "
                "the model that they were trained on (checkpoint.initial_load_path)"
            )

    def _load_hf(self) -> None:
        if "model" in self.checkpoint.exclude_from_loading:
            return
        folder = self.checkpoint.initial_load_path or self.job["model"]["hf_assets_path"]
        tensors = {name.removeprefix(MODEL): x for name, x in self.tensors.model().items()}
        load_hf(Path(folder), self.model, tensors)

    def _load_tensors(
        self, source: Path, manifest: Manifest, parts: list[str], *, base: bool
    ) -> None:
        """Loads parts of a checkpoint. `base`: it is another run's, and this run begins with it."""
        own: dict[str, Tensor] = {}
        if MODEL in parts and base:  # Base weights too, and adapters only where it has them.
            named = self.tensors.model()
            own = {n: x for n, x in named.items() if ADAPTER not in n or n in manifest.tensors}
        elif MODEL in parts:
            own = self.tensors.saved_model()
        if OPTIMIZER in parts:
            own |= self.tensors.optimizer_states()
        tensors = own | (self._as_stored(own, manifest) if base else {})
        unfit = f"checkpoint {source} does not fit the model"
        if problems := audit(manifest, gather_specs(tensors), parts):
            raise RunError(f"{unfit}: {'; '.join(problems)}")
        read_tensors(tensors, source)
        sums = checksums(tensors)
        if damaged := compare_checksums(manifest, sums):
            raise RunError(
                f"checkpoint {source} is damaged: wrong checksum of {', '.join(damaged)}; "
                "an earlier one can be chosen with checkpoint.load_step"
            )
        # A model that does not tie these weights has parameters of the same names.
        if MODEL in parts and (problems := unlike_copies(self.tensors.config, sums)):
            raise RunError(f"{unfit}: {'; '.join(problems)}")
        for name in tensors.keys() & self.tensors.base_names:
            local_part(own[name]).copy_(local_part(tensors[name]))

    def _as_stored(self, tensors: Mapping[str, Tensor], manifest: Manifest) -> dict[str, Tensor]:
        """Returns tensors to read base weights into, in the types of the checkpoint, which may be
        wider: copies as large as this rank's part."""
        found = tensors.keys() & self.tensors.base_names & manifest.tensors.keys()
        types = {name: getattr(torch, manifest.tensors[name].dtype) for name in found}
        return {name: torch.empty_like(tensors[name], dtype=types[name]) for name in found}


def _state(found: Found) -> dict[str, Any]:
    """Returns the saved state without what is excluded."""
    doing = f"cannot load checkpoint {found.path}"
    state = on_rank_zero(lambda: read_train_state(found.path), doing=doing)
    parts = {key: "dataloader" if key == DATA else "train_state" for key in state}
    return {key: state[key] for key, part in parts.items() if part not in found.excluded}
