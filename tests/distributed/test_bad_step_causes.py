"""The first place that is not finite is the first of all ranks."""

import torch
import torch.distributed as dist

from titan_moe.runtime.ranks import run_on_ranks
from titan_moe.training.bad_step_causes import _GRADIENT, _PARAMETER, _first_place, _in_tensors

NAMES = ["a", "b", "c"]


def first_places() -> tuple[str, str, str]:
    """Rank 0 holds a and a bad c, rank 1 a bad b."""
    held = ({"a": 1.0, "c": torch.inf}, {"b": torch.nan})[dist.get_rank()]
    tensors = {name: torch.full((2,), value) for name, value in held.items()}
    forwards = _first_place(_in_tensors(_PARAMETER, tensors, NAMES))
    backwards = _first_place(_in_tensors(_GRADIENT, tensors, NAMES[::-1]))
    return forwards, backwards, _first_place([])


def test_first_place_of_all_ranks_is_named():
    expected = (
        "first seen in the parameter b",
        "first seen in the gradient of c",
        "every tensor is finite by itself: a sum over them overflowed",
    )
    assert run_on_ranks(first_places, 2) == [expected] * 2
