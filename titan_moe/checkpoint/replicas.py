"""Whether ranks that hold the same part of a tensor hold the same values of it."""

import logging
from collections.abc import Mapping, Sequence
from math import prod

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_moe.checkpoint.checksum import checksums
from titan_moe.checkpoint.manifest import gather_specs
from titan_moe.checkpoint.tensors import MODEL, model_tensors, optimizer_tensors
from titan_moe.distributed.dtensor import local_part
from titan_moe.models.config import ModelConfig, tied_weights
from titan_moe.runtime.errors import RunError

logger = logging.getLogger(__name__)


class ReplicaCheck:
    """Compares, every `freq` steps, what several ranks hold of the parameters, the router biases,
    the optimizer's state and the copies of tied weights.

    Replicas are updated alike, by the same kernels from the same sums, so that they stay equal to
    the bit; those that are not show a processor or a memory that errs without a word, or a bug. A
    layout that shards everything has nothing to compare.
    """

    def __init__(
        self, parts: Sequence[nn.Module], config: ModelConfig, optimizer: Optimizer, freq: int
    ) -> None:
        """`parts` are this rank's of the model."""
        self._parts = parts
        self._config = config
        self._optimizer = optimizer
        self._freq = freq
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __call__(self, step: int) -> None:
        """Compare if it is time; collective. RunError naming tensors and ranks that differ."""
        if not self._freq or step % self._freq:
            return
        tensors = model_tensors(self._parts) | optimizer_tensors(self._parts, self._optimizer)
        if not self._shapes:
            self._shapes = {name: spec.shape for name, spec in gather_specs(tensors).items()}
            self._say_how_many(tensors)
        try:
            sums = checksums(tensors, self._shapes)
        except RunError as error:
            raise RunError(f"after step {step} {error}") from None
        if problems := unlike_copies(self._config, sums):
            raise RunError(f"after step {step} {'; '.join(problems)}")

    def _say_how_many(self, tensors: Mapping[str, Tensor]) -> None:
        held: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(held, sum(local_part(each).numel() for each in tensors.values()))
        if dist.get_rank() == 0:
            logger.info(
                "replicas are compared every %d steps: an element of model and optimizer state "
                "is held by %.2f ranks on average",
                self._freq,
                sum(held) / sum(prod(shape) for shape in self._shapes.values()),
            )


def unlike_copies(config: ModelConfig, sums: Mapping[str, str]) -> list[str]:
    """Copies of a tied weight begin and are updated alike: a line for each that is not, by all
    tensors' checksums."""
    lines = []
    for first, *copies in tied_weights(config):
        if differ := [name for name in copies if sums[MODEL + name] != sums[MODEL + first]]:
            lines.append(f"{first} and its copies {', '.join(differ)} are not the same")
    return lines
