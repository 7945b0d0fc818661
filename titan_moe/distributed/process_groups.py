"""One process group per distinct list of ranks and class of traffic.

Torch's own unflattening makes new groups for every name, though many names are the same ranks: `pp`
in both views, `dp_replicate` in both, `etp` and `tp` where they coincide. At thousands of ranks a
group costs start-up time and NCCL memory. Only ranks of a group take part in making it, so the work
per rank does not grow with the world.
"""

from datetime import timedelta
from enum import Enum

import torch.distributed as dist
from torch.distributed import ProcessGroup


class Traffic(Enum):
    """NCCL runs one collective at a time per communicator, so these two never share one: a shared
    communicator would serialise FSDP's prefetch behind the token dispatch."""

    PARAMETERS = "parameters"
    TOKENS = "tokens"


class ProcessGroups:
    """Makes groups on first use and hands the same one out again for the same ranks and traffic.

    Every rank must ask for its groups in the same order of axes: making one waits for its members.
    `timeout`: longest wait for a collective; left out, the backend's own, not that of the world.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._groups: dict[tuple[tuple[int, ...], Traffic | None], ProcessGroup] = {}

    def get(self, ranks: tuple[int, ...], traffic: Traffic) -> ProcessGroup:
        """The group of `ranks`, this one among them; all groups of one rank are the same."""
        if len(ranks) == dist.get_world_size() and traffic is Traffic.PARAMETERS:
            return dist.group.WORLD  # type: ignore[return-value]
        key = (ranks, traffic if len(ranks) > 1 else None)
        if key not in self._groups:
            self._groups[key] = dist.new_group(
                list(ranks), timeout=self._timeout, use_local_synchronization=True
            )
        return self._groups[key]

    def known(self, ranks: tuple[int, ...], traffic: Traffic) -> ProcessGroup | None:
        """As `get`, if the group exists; makes none."""
        if len(ranks) == dist.get_world_size() and traffic is Traffic.PARAMETERS:
            return dist.group.WORLD
        return self._groups.get((ranks, traffic if len(ranks) > 1 else None))

    def all(self) -> list[ProcessGroup]:
        """Every group made so far."""
        return list(self._groups.values())

    @property
    def num_groups(self) -> int:
        """Groups of more than one rank that this rank belongs to, the default group not counted."""
        return sum(len(ranks) > 1 for ranks, _ in self._groups)
