"""One process group per distinct list of ranks, class of traffic and options.

Torch's own unflattening makes new groups for every name, though many names are the same ranks: `pp`
in both views, `dp_replicate` in both, `etp` and `tp` where they coincide. At thousands of ranks a
group costs start-up time and NCCL memory. Only ranks of a group take part in making it, so the work
per rank does not grow with the world.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from titan_moe.config.job_config import Comm
from titan_moe.runtime.process import backend_timeout, nccl_options


class Traffic(Enum):
    """NCCL runs one collective at a time per communicator, so these two never share one: a shared
    communicator would serialise FSDP's prefetch behind the token dispatch."""

    PARAMETERS = "parameters"
    TOKENS = "tokens"


@dataclass(frozen=True)
class GroupOptions:
    """Holds a group's traffic and limits; groups that differ in either are distinct."""

    traffic: Traffic
    comm: Comm = field(default_factory=Comm)

    def of_backend(self) -> dict[str, Any]:
        """The arguments of `new_group` that make a group of NCCL alone, if the world has it: with
        gloo beside it, torch would also connect every pair of ranks, for tensors of the host, which
        only control groups send. Other backends take none."""
        if "nccl" not in dist.get_backend_config():
            return {}
        options = nccl_options(self.comm, tokens=self.traffic is Traffic.TOKENS)
        return {"backend": "nccl", "pg_options": options}


_Key = tuple[tuple[int, ...], GroupOptions | None]


@dataclass
class ProcessGroups:
    """Makes groups on first use and hands the same one out again for the same ranks and options.

    Every rank must ask for its groups in the same order of axes: making one waits for its members.
    """

    _groups: dict[_Key, ProcessGroup] = field(default_factory=dict, init=False, repr=False)

    def get(
        self, ranks: tuple[int, ...], options: GroupOptions, description: str = ""
    ) -> ProcessGroup:
        """Returns the group of `ranks`, this one among them; all groups of one rank are the same.

        Args:
            description: what a flight recorder shows; that of the first call counts.
        """
        known = self.known(ranks, options)
        if known is not None:
            return known
        group: Any = dist.new_group(
            list(ranks),
            timeout=backend_timeout(options.comm.init_timeout_seconds),
            **options.of_backend(),
            use_local_synchronization=True,
            group_desc=description or None,
        )
        self._groups[_key(ranks, options)] = group
        return group

    def known(self, ranks: tuple[int, ...], options: GroupOptions) -> ProcessGroup | None:
        """Returns the group that `get` would, if it exists already; else None."""
        if len(ranks) == dist.get_world_size() and options.traffic is Traffic.PARAMETERS:
            return dist.group.WORLD
        return self._groups.get(_key(ranks, options))

    def all(self) -> list[ProcessGroup]:
        """Every group made so far."""
        return list(self._groups.values())

    @property
    def num_groups(self) -> int:
        """Groups of more than one rank that this rank belongs to, the default group not counted."""
        return sum(len(ranks) > 1 for ranks, _ in self._groups)


def _key(ranks: tuple[int, ...], options: GroupOptions) -> _Key:
    return ranks, options if len(ranks) > 1 else None
