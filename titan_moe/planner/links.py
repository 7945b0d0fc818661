"""States what a rank's links to the ranks of a group carry. Imports no torch."""

from functools import lru_cache
from typing import NamedTuple

from titan_moe.distributed.parallel_dims import ParallelDims
from titan_moe.runtime.gpus import Device


class Links(NamedTuple):
    """One rank's ways to the ranks of a group."""

    size: int
    on_node: int
    device: Device

    def collective(self, num_bytes: float) -> float:
        """Returns the seconds of a gather or reduction of so many bytes in all. Rings use the
        adapters of all ranks that a node has in the group."""
        if self.size == 1:
            return 0.0
        device, one_node = self.device, self.on_node == self.size
        rate = device.link if one_node else min(device.link, device.network * self.on_node)
        moved = num_bytes * (self.size - 1) / self.size
        return moved / (rate * device.reach) + self.latency

    def exchange(self, num_bytes: float, between_nodes: float) -> float:
        """Returns the seconds in which each rank sends so many bytes, evenly to all ranks of the
        group, of which a part `between_nodes`, in bytes, is for ranks of other nodes."""
        if self.size == 1:
            return 0.0
        device = self.device
        inside = num_bytes * (self.on_node - 1) / self.size / device.link
        outside = between_nodes * (1 - self.on_node / self.size) / device.network
        return max(inside, outside) / device.reach + self.latency

    @property
    def latency(self) -> float:
        """Seconds of a collective without bytes: on a CPU each pair of neighbours takes a turn."""
        return self.device.latency * (self.size - 1 if self.device.cores else 1)


@lru_cache(maxsize=4096)
def links_of(dims: ParallelDims, axis: str, device: Device) -> Links:
    ranks = dims.group_of(0, axis)
    return Links(len(ranks), sum(rank < device.node for rank in ranks), device)
