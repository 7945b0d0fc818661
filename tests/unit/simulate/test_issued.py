"""Whole numbers that a rank of a fake world gets from the others."""

import numpy as np
import torch
import torch.distributed as dist

from titan_moe.runtime.process_pool import in_fresh_processes
from titan_moe.simulate.fake_rank import fake_world
from titan_moe.simulate.issued import RecordingRank
from titan_moe.simulate.whereabouts import Whereabouts


class _Peers:
    """Say what they are told to, whatever this rank says."""

    def __init__(self, values: list) -> None:
        self._values = values

    def exchange(self, meeting: object, value: object) -> list:
        return self._values


def reductions() -> list[float]:
    found = []
    for op in ("SUM", "MIN", "MAX"):
        peers = _Peers([(np.array(value), None) for value in (3, -1, 2)])
        own = torch.tensor(3)
        with fake_world(0, 3), RecordingRank(peers, Whereabouts()):  # type: ignore[arg-type]
            dist.all_reduce(own, getattr(dist.ReduceOp, op))
        found.append(own.item())
    return found


def received_by_a_rank_with_nothing() -> list[int]:
    sends = [(np.array([5, 6, 7]), [1, 2]), (np.array([], dtype=np.int64), [0, 0])]
    received = torch.zeros(2, dtype=torch.int64)
    with fake_world(1, 2), RecordingRank(_Peers(sends), Whereabouts()):  # type: ignore[arg-type]
        dist.all_to_all_single(received, received[:0], [2, 0], [0, 0])
    return received.tolist()


def values_of_others() -> tuple[list[float], list[int]]:
    return reductions(), received_by_a_rank_with_nothing()


def test_whole_numbers_come_from_the_others() -> None:
    ((_, found),) = in_fresh_processes(values_of_others, [()], num_workers=1)
    assert found == ([4, -1, 3], [6, 7])
