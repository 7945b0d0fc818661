"""A step's numbers, of which every rank has a part, summed over the world in one all-reduce."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_world(terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every term's sum over all ranks, in its own shape, as float64: whole numbers stay exact up to
    2^53. Collective, with one all-reduce for all terms; waits for no device.

    `terms` are on one device, and have the same names in the same order on every rank.
    """
    flat = torch.cat([term.reshape(-1).double() for term in terms.values()])
    dist.all_reduce(flat)
    pieces = flat.split([term.numel() for term in terms.values()])
    return {
        name: piece.view(term.shape)
        for (name, term), piece in zip(terms.items(), pieces, strict=True)
    }


def read(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Those of the sums that are single numbers. Waits for the device, once for all of them."""
    single = {name: value for name, value in sums.items() if value.ndim == 0}
    return dict(zip(single, torch.stack(list(single.values())).tolist(), strict=True))


def added(terms: Iterable[Tensor], *, like: Tensor) -> Tensor:
    """The sum of scalars; 0, of the type and on the device of `like`, where there are none."""
    terms = list(terms)
    return torch.stack(terms).sum() if terms else torch.zeros_like(like)
