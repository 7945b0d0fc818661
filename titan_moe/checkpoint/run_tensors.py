"""The tensors of a run: those that its checkpoints hold, and the base weights of its adapters."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from titan_moe.checkpoint.checksums import checksums, joint_digest, unlike_copies
from titan_moe.checkpoint.tensors import base_names, model_tensors, optimizer_tensors
from titan_moe.models.config import ModelConfig
from titan_moe.runtime.errors import RunError


class RunTensors:
    """The tensors of a model and its optimizer, by name; this rank's parts.

    Args:
        optimizer: None where there is none to save or load.
        config: the model's dimensions; None where its tied weights are not known.
        lora: that table; with a rank, checkpoints leave out the base weights.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: Optimizer | None,
        config: ModelConfig | None,
        lora: Mapping[str, Any],
    ) -> None:
        self._modules, self.optimizer, self.config = modules, optimizer, config
        self.base_names = base_names(modules, lora)
        """Names of the base weights, which checkpoints leave out."""
        self._base_digest: str | None = None

    def model(self) -> dict[str, Tensor]:
        """Returns all tensors of the model."""
        return model_tensors(self._modules)

    def saved_model(self) -> dict[str, Tensor]:
        """Returns the tensors of the model that a checkpoint of this run holds."""
        return {name: x for name, x in self.model().items() if name not in self.base_names}

    def optimizer_states(self) -> dict[str, Tensor]:
        return optimizer_tensors(self._modules, self.optimizer) if self.optimizer else {}

    def checksums(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Returns checksums by name. Raises RunError on all ranks when replicas of a tensor, or
        copies of a tied weight, differ. Collective."""
        sums = checksums(tensors)
        if self.config and (problems := unlike_copies(self.config, sums)):
            raise RunError("; ".join(problems))
        return sums

    def base_digest(self) -> str:
        """Returns a digest of the base weights; empty where there are none. Collective, once."""
        if self._base_digest is None:
            named = self.model()
            sums = checksums({name: named[name] for name in sorted(self.base_names)})
            self._base_digest = joint_digest(sums)
        return self._base_digest
