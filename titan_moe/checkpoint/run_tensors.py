"""The tensors of a run: those that its checkpoints hold, and the base weights of its adapters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from titan_moe.checkpoint.checksums import checksums, joint_digest, unlike_copies
from titan_moe.checkpoint.tensors import MODEL, model_tensors, optimizer_tensors
from titan_moe.models.config import ModelConfig
from titan_moe.models.decoder import ADAPTER
from titan_moe.runtime.errors import RunError


@dataclass
class RunTensors:
    """The tensors of a model and its optimizer, by name; this rank's parts."""

    modules: Sequence[nn.Module]
    optimizer: Optimizer | None
    """None where there is none to save or load."""
    config: ModelConfig
    """The model's dimensions."""
    lora: Mapping[str, Any]
    """That table; with a rank, checkpoints leave out the base weights."""

    @cached_property
    def base_names(self) -> set[str]:
        """Names of the base weights of adapters, which may be on another stage of the pipeline:
        checkpoints leave them out."""
        if self.lora.get("rank") is None:
            return set()
        names = (name for module in self.modules for name, _ in module.named_parameters())
        return {MODEL + name for name in names if ADAPTER not in name}

    def model(self) -> dict[str, Tensor]:
        """Returns all tensors of the model."""
        return model_tensors(self.modules)

    def saved_model(self) -> dict[str, Tensor]:
        """Returns the tensors of the model that a checkpoint of this run holds."""
        return {name: x for name, x in self.model().items() if name not in self.base_names}

    def optimizer_states(self) -> dict[str, Tensor]:
        return optimizer_tensors(self.modules, self.optimizer) if self.optimizer else {}

    def checksums(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Returns checksums by name. Raises RunError on all ranks when replicas of a tensor, or
        copies of a tied weight, differ. Collective."""
        sums = checksums(tensors)
        if problems := unlike_copies(self.config, sums):
            raise RunError("; ".join(problems))
        return sums

    @cached_property
    def base_digest(self) -> str:
        """A digest of the base weights; empty where there are none. Collective, once."""
        named = self.model()
        return joint_digest(checksums({name: named[name] for name in sorted(self.base_names)}))
