"""One process group per distinct list of ranks, class of traffic and options.

torch's own unflattening makes new groups for every name, though many names are the same ranks: `pp`
in both views, `dp_replicate` in both, `etp` and `tp` where they coincide. At thousands of ranks a
group costs start-up time and NCCL memory. Each rank asks for its own groups alone, so the work per
rank does not grow with the world.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from titan_moe.comm.process import backend_timeout, nccl_options
from titan_moe.config.job_config import AxisOptions, Comm

GroupKind = tuple[str, AxisOptions | None]
"""Names what travels over a group, "tokens", "parameters" or "gradients", and holds the options of
the backend that are an axis' own: groups of the same ranks that differ in either are distinct. NCCL
runs one collective at a time per communicator: if tokens and parameters shared one, FSDP's prefetch
would wait behind the token dispatch. Gradients share that of parameters unless
`comm.separate_reduce_scatter` is set."""
_Key = tuple[tuple[int, ...], GroupKind | None]


@dataclass
class ProcessGroups:
    """Makes groups on first use and hands the same one out again for the same ranks and kind.

    Every rank must ask for its groups in the same order of axes: making one waits for its members,
    or, with `comm.split_communicators`, for all ranks, each of which makes its own.
    """

    comm: Comm = field(default_factory=Comm)
    device: str = "cuda"
    """The tensors that travel; NCCL takes those of "cuda" alone."""
    _groups: dict[_Key, ProcessGroup] = field(default_factory=dict, init=False, repr=False)

    def get(self, ranks: tuple[int, ...], kind: GroupKind, description: str = "") -> ProcessGroup:
        """Returns the group of `ranks`, this one among them; all groups of one rank are the same.

        Args:
            description: what a flight recorder shows; that of the first call counts.
        """
        if (known := self.known(ranks, kind)) is not None:
            return known
        options: dict[str, Any] = {}
        if self.device == "cuda" and "nccl" in dist.get_backend_config():
            # NCCL alone: with gloo beside it, torch would also connect every pair of ranks, for
            # tensors of the host, which only control groups send.
            options = {
                "backend": "nccl",
                "pg_options": nccl_options(self.comm, kind[0] == "tokens", kind[1]),
            }
        group: Any = dist.new_group(
            list(ranks),
            timeout=backend_timeout(self.comm.init_timeout_seconds),
            use_local_synchronization=True,
            group_desc=description or None,
            **options,
        )
        self._groups[_key(ranks, kind)] = group
        return group

    def known(self, ranks: tuple[int, ...], kind: GroupKind) -> ProcessGroup | None:
        """Returns the group that `get` would, if it exists already; else None."""
        if len(ranks) == dist.get_world_size() and kind == ("parameters", None):
            return dist.group.WORLD
        return self._groups.get(_key(ranks, kind))

    def all(self) -> list[ProcessGroup]:
        """Every group of this rank made so far, after the world's."""
        return [dist.group.WORLD, *self._groups.values()]  # type: ignore[list-item]

    def connect(self, pairs: ProcessGroup, device: torch.device) -> None:
        """Makes the communicators of all groups that there are, while memory is free. Collective.

        NCCL makes a group's communicator, and its buffers, in the group's first collective. Left to
        the step, the world's would come at its end, where a rank without memory for it leaves the
        others waiting, and a pipeline's in its first batch of sends, which has two of the group's
        ranks and would wait for ever. All ranks connect the groups in the order in which they made
        them, then the world, then the pairs of an exchange over the group `pairs`.
        """
        rows = torch.zeros(pairs.size(), device=device)
        world, *others = self.all()
        for group in (*others, world):
            if group.size() > 1:
                dist.all_reduce(rows, group=group)
        if pairs.size() > 1:
            dist.all_to_all_single(torch.empty_like(rows), rows, group=pairs)
        rows.cpu()  # Waits for all of them.

    @property
    def num_groups(self) -> int:
        """Groups of more than one rank that this rank belongs to, the default group not counted."""
        return sum(len(ranks) > 1 for ranks, _ in self._groups)


def _key(ranks: tuple[int, ...], kind: GroupKind) -> _Key:
    return ranks, kind if len(ranks) > 1 else None
