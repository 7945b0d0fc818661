"""Routings that a step must survive: choices of experts as a function of rank, layer and call."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_moe.data.batch import IGNORE_INDEX, Batch
from titan_moe.simulate.fake_rank import balanced_choice

_Choice = Callable[[Tensor], Tensor]
"""scores_TE -> experts_TK, as `GivenExperts` takes it."""


def even(seed: int, num_experts: int, top_k: int) -> _Choice:
    """Gives every expert equally many tokens of every rank."""
    return balanced_choice(num_experts, top_k)


def skewed(seed: int, num_experts: int, top_k: int) -> _Choice:
    """Few experts get most tokens, others on every rank, at every layer and at every call."""
    generator = np.random.default_rng(seed)
    log_weights_E = -np.log(np.arange(1, num_experts + 1))  # Zipf's law.

    def select_experts(scores_TE: Tensor) -> Tensor:
        # Gumbel's trick: the largest are a draw without replacement.
        noise_TE = generator.gumbel(size=(len(scores_TE), num_experts))
        order_TE = np.argsort(-generator.permutation(log_weights_E) - noise_TE, axis=1)
        return torch.from_numpy(order_TE[:, :top_k].copy())

    return select_experts


def one_rank(seed: int, num_experts: int, top_k: int) -> _Choice:
    """Sends all tokens of all ranks to the last experts: one rank gets everything where it has as
    many as a token chooses, and the others nothing."""
    return _always(range(num_experts - top_k, num_experts))


def scattered(seed: int, num_experts: int, top_k: int) -> _Choice:
    """Sends all tokens of a rank to the same few experts, which differ by rank and layer. One
    expert of a rank may get everything, and the others nothing."""
    first = seed % num_experts
    stride = max(1, num_experts // top_k)
    return _always((first + k * stride) % num_experts for k in range(top_k))


def _always(experts: Iterable[int]) -> _Choice:
    experts_K = torch.tensor(list(experts))
    return lambda scores_TE: experts_K.repeat(len(scores_TE), 1)


class Routing(NamedTuple):
    """Describes the choice of experts, and of targets, that all ranks make in one step."""

    name: str
    choice: Callable[[int, int, int], _Choice]
    """Takes a seed, which each rank has of its own for each layer, the number of experts, and how
    many a token gets."""
    masks_a_rank: bool = False
    """True if the first cp rank of the first data rank has no target."""


ROUTINGS = (
    Routing("even", even),
    Routing("skewed", skewed),
    Routing("one rank", one_rank),
    Routing("scattered", scattered),
    Routing("masked rank", skewed, masks_a_rank=True),
)


def without_targets(batch: Batch, positions_S: Tensor) -> Batch:
    """Returns the same batch without targets at these positions."""
    labels_BS = batch.labels_BS.clone()
    labels_BS[:, positions_S] = IGNORE_INDEX
    return Batch(batch.tokens_BS, labels_BS, batch.documents_BS, batch.samples)
