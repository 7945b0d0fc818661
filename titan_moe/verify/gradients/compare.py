"""Tensors against their reference, and what a wrong ratio of norms says about the mistake."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """The largest difference that counts as equal."""

    bound: float
    """Largest relative error of a rank's shard of a tensor."""
    least_share: float
    """The error of a rank's shard is divided by the shard's norm, but at least by this share of the
    whole tensor's norm (of one expert's, for experts): a shard that should be zero holds rounding
    errors of larger numbers."""


_CAUSES_FIRST = (
    *("num_targets", "loss", "balance_loss", "mtp_loss", "indexer_loss", "grad_norm", "counts"),
    *("gradient", "expert_bias", "previous_load"),
    *("exp_avg", "exp_avg_sq", "momentum_buffer", "parameter"),
)
"""Quantities in the order in which a step makes one from the other."""
FEW = 8
"""Numbers of a parameter in whose gradient terms of all tokens may cancel, and leave rounding
errors: they are compared with the gradients of their module."""
TOLERANCES = {"float64": Tolerance(1e-9, 1e-6), "float32": Tolerance(1e-5, 1.0)}


class TensorDifference(NamedTuple):
    """The difference of one rank's shard of one tensor from the reference's, after one step."""

    step: int
    rank: int
    quantity: str
    """"gradient", "parameter", "exp_avg", ... or a number of the whole step, such as "loss"."""
    name: str
    """The parameter's or layer's name; an expert's weight ends in its number: w1[3]."""
    error: float
    """||ours - reference|| / max(||reference||, least_share * ||whole reference||)."""
    ratio: float
    """||ours|| / ||reference||."""

    def line(self, axes: Mapping[str, int]) -> str:
        """Returns a line for a reader: place, error, and the mistake that the ratio suggests."""
        shown = f"step {self.step}, rank {self.rank}: {self.quantity} {self.name}".rstrip()
        cause = fingerprint(self.ratio, axes)
        return f"{shown}: off by {self.error:.1e}, norm {self.ratio:.6g} of the reference's{cause}"


def worst(errors: Iterable[float]) -> float:
    """Returns the largest error. NaN is infinite, and so is a comparison of nothing."""
    return max((math.inf if math.isnan(each) else each for each in errors), default=math.inf)


def above_bound(differences: Iterable[TensorDifference], dtype: str) -> list[TensorDifference]:
    """Returns the differences that do not count as equal in a type, NaN among them."""
    return [each for each in differences if not each.error <= TOLERANCES[dtype].bound]


def by_cause(difference: TensorDifference) -> tuple[int, int, float]:
    """Sorts causes before what follows from them, the largest error of a quantity first."""
    return difference.step, _CAUSES_FIRST.index(difference.quantity), -difference.error


def first_few(items: Sequence[str], most: int = 5) -> list[str]:
    """Returns the first items and, in a last one, how many others there are."""
    more = len(items) - most
    return [*items[:most], f"and {more} more"] if more > 0 else list(items)


def compare(
    where: tuple[int, int, str, str], ours: Tensor, theirs: Tensor, *, least_norm: float
) -> TensorDifference:
    """Compares a shard as held with what it should be.

    A shard of another shape, or with NaN, is infinitely far off.

    Args:
        where: step, rank, quantity and name.
        least_norm: the least norm that the difference is divided by.
    """
    if ours.shape != theirs.shape:
        return TensorDifference(*where, math.inf, math.nan)
    ours, theirs = ours.double(), theirs.double()
    distance, our_norm, their_norm = (ours - theirs).norm(), ours.norm(), theirs.norm()
    # 0 / 0 counts as equal: zeros are right if the reference is zero.
    error = torch.where(distance == 0, 0.0, distance / their_norm.clamp(min=least_norm))
    ratio = torch.where(our_norm == their_norm, 1.0, our_norm / their_norm)
    return TensorDifference(*where, worst([error.item()]), ratio.item())


def module_norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns for each tensor of few numbers the norm of all tensors of its module, [1]."""
    squares: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0]
        squares[module] = squares.get(module, torch.zeros(1)) + tensor.double().square().sum()
    few = [name for name, tensor in tensors.items() if tensor.numel() <= FEW]
    return {name: squares[name.rpartition(".")[0]].sqrt() for name in few}


def fingerprint(ratio: float, axes: Mapping[str, int], within: float = 1e-6) -> str:
    """The reduction that is missing or done twice, where a ratio is exactly an axis' size or 2."""
    for number, cause in (
        (ratio, "reduced twice, or summed where it is whole"),
        (1 / ratio if ratio else 0.0, "not reduced, or averaged"),
    ):
        hits = [axis for axis, size in axes.items() if size > 1 and _is(number, size, within)]
        if hits or _is(number, 2, within):
            size = round(number)
            shown = size if number is ratio else f"1/{size}"
            over = f" over {' or '.join(hits)}" if hits else ""
            return f": exactly {shown}, the fingerprint of a sum {cause}{over}"
    return ""


def _is(number: float, size: int, within: float) -> bool:
    return abs(number - size) < within * size
