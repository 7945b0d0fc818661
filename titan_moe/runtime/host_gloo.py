"""A backend of torch.distributed for ranks that share a GPU: collectives go through the host.

NCCL refuses two ranks on one GPU, and gloo takes a GPU's tensors in some collectives alone, which
differ from one version of torch to another. Here every collective copies its tensors to the host,
runs on gloo, and copies back what it wrote. Each copy waits for the current stream: slow, and right
on any stream.

A tensor of the host is copied as well, so that tests on a CPU see what a copy gets wrong.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

BACKEND = "host_gloo"
_DEVICES = ["cpu", "cuda"]
# Each writes to the tensors of its first argument, but `send`. torch 2.13 gave some a second name.
_COLLECTIVES = {
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "send", "recv"),
    *("allgather", "allgather_coalesced", "gather", "scatter", "reduce_scatter", "alltoall"),
    *("_allgather_base", "_reduce_scatter_base", "alltoall_base"),
    *("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
    *("gather_single", "gather_into_tensor"),
    *("all_gather_single_coalesced", "reduce_scatter_single_coalesced"),
}


class _HostWork(dist.Work):
    """A collective of gloo under way; its results are on the device once `wait` has returned."""

    def __init__(self, work: dist.Work, results: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._work: dist.Work | None = work
        self._results = results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits at most the group's timeout, or `timeout` if it is not 0. Returns at once if it has
        been called before: gloo would wait for a second message."""
        if self._work is not None:
            self._work.wait(timeout)
            self._work = None
            for tensor, copy in self._results:
                tensor.data.copy_(copy)  # Autograd sees it as little as a backend's write.
        return True

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()


def _through_host(name: str) -> Callable[..., dist.Work]:
    """Returns a method that runs gloo's of this name on copies of the tensors."""

    def collective(self: Any, *arguments: Any) -> dist.Work:
        copies = tree_map_only(Tensor, lambda each: each.detach().to("cpu", copy=True), arguments)
        work = getattr(self.gloo, name)(*copies)
        written = zip(tree_leaves(arguments[0]), tree_leaves(copies[0]), strict=True)
        return _HostWork(work, [] if name == "send" else list(written))

    return collective


_methods = {name: _through_host(name) for name in _COLLECTIVES & set(dir(dist.ProcessGroup))}
_Staged: Any = type("_Staged", (dist.ProcessGroup,), _methods)


class HostGloo(_Staged):
    """A process group whose gloo never sees a tensor of a GPU. A barrier has no tensors, so gloo
    runs it directly."""

    def __init__(self, options: Any) -> None:
        place = options.store, options.group_rank, options.group_size
        super().__init__(options.group_rank, options.group_size)
        # A group of one has torch's own options, with the interfaces of GLOO_SOCKET_IFNAME.
        alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=options.timeout)
        how: Any = alone.options
        how._threads = 1  # Two write the name of an operation at once: comm/collectives.py.
        # The flight recorder tells a group's ranks by these.
        how.global_ranks_in_group = options.global_ranks_in_group
        how.group_name = options.group_id
        backend = dist.ProcessGroupGloo(*place, how)
        self.gloo, kind = dist.ProcessGroup(*place), dist.ProcessGroup.BackendType.GLOO
        for group in (self, self.gloo):
            group._set_default_backend(kind)
            for device in _DEVICES:
                group._register_backend(torch.device(device), kind, backend)


def register() -> None:
    """Makes the backend known to torch in this process."""
    dist.Backend.register_backend(
        BACKEND, lambda options, _: HostGloo(options), extended_api=True, devices=_DEVICES
    )
