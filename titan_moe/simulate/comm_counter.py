"""Bytes that a rank puts on the wire, counted from below Python's functions while a program runs.

Counted is what has to leave the rank with the algorithm that moves least (a ring for gathers and
reductions, Patarasuk and Yuan 2009): an all-gather of own n bytes among P ranks sends (P - 1) n, a
reduce-scatter that leaves n bytes likewise, an all-reduce of n bytes both halves, 2 (P - 1) n / P;
an all-to-all all but its own part. A receipt is its sender's.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe.distributed.mesh import Meshes
from titan_moe.simulate.tiling import PARAMETER_AXES, TOKEN_AXES

NAMESPACES = ("c10d", "_c10d_functional")
WORLD = "world"
_FSDP = "/torch/distributed/fsdp/"


class Flow(NamedTuple):
    """What bytes are summed by."""

    axis: str
    """The mesh axes whose group it is; "world" for sums of a step's scalars and counts."""
    op: str


class Traffic(NamedTuple):
    """What left this rank."""

    calls: int
    bytes: float


class Wire(TorchDispatchMode):
    """Counts every collective of the thread that it is entered in, backward included (which a CPU
    runs in the same thread); changes nothing.

    `groups` may be filled later than the mode is entered: before, nothing is counted. Raises
    NotImplementedError at a collective that it does not know, rather than miss its bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[str, str] = {}
        """Group name -> its axes, as `axes_of_groups` has them."""
        self.seen: dict[Flow, float] = defaultdict(float)
        self.calls: Counter[Flow] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes again, with what it is made of.
        if func.namespace in NAMESPACES:
            self.count(func, args)
        return func(*args, **(kwargs or {}))

    def count(self, func: Any, args: tuple) -> None:
        """Add one call."""
        name = func.__name__.partition(".")[0]
        if not self.groups or name in _SILENT:
            return
        if name not in _SENT:
            raise NotImplementedError(f"the bytes of {func} are not known")
        given = dict(zip([a.name for a in func._schema.arguments], args, strict=False))
        group = group_of(given)
        flow = Flow(self._axis(group), _OPS.get(name, name.strip("_")))
        self.seen[flow] += _SENT[name](given, group)
        self.calls[flow] += 1

    def traffic(self) -> dict[Flow, Traffic]:
        """All that was counted."""
        return {flow: Traffic(self.calls[flow], self.seen[flow]) for flow in sorted(self.calls)}

    def clear(self) -> None:
        """Start anew."""
        self.seen.clear()
        self.calls.clear()

    def _axis(self, group: dist.ProcessGroup) -> str:
        axis = self.groups.get(group.group_name, "?")
        # Parameters of all ranks take the world's group, as do the sums that end a step.
        if group is dist.group.WORLD and not _called_by_fsdp():
            return WORLD
        return axis


def axes_of_groups(meshes: Meshes) -> dict[str, str]:
    """Group name -> the names of the axes that it serves, "+" between them; makes no group."""
    names: dict[str, list[str]] = {}
    for axis in (*TOKEN_AXES, *PARAMETER_AXES):
        if meshes.dims.size(axis) == 1 or (axis == "sequence" and "sequence" in _same(meshes)):
            continue
        if group := meshes.known_group(axis):
            names.setdefault(group.group_name, []).append(axis)
    world = dist.group.WORLD
    assert world is not None
    return {world.group_name: WORLD} | {name: "+".join(axes) for name, axes in names.items()}


def _same(meshes: Meshes) -> tuple[str, ...]:
    """Joined axes that are one of their parts."""
    return ("sequence",) if 1 in (meshes.dims.cp, meshes.dims.tp) else ()


def group_of(given: Mapping[str, Any]) -> dist.ProcessGroup:
    """The group among a collective's arguments, whichever way it is named."""
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    if isinstance(group, torch.ScriptObject):
        return dist.ProcessGroup.unbox(group)
    assert isinstance(group, dist.ProcessGroup), f"no group among {sorted(given)}"
    return group


def _called_by_fsdp() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if _FSDP in frame.f_code.co_filename.replace("\\", "/"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _bytes(tensors: Any) -> int:
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    return sum(x.numel() * x.element_size() for x in tensors)


def _gather(own: str) -> Callable[[Mapping[str, Any], dist.ProcessGroup], float]:
    return lambda given, group: (group.size() - 1) * _bytes(given[own])


def _scatter(whole: str) -> Callable[[Mapping[str, Any], dist.ProcessGroup], float]:
    return lambda given, group: (group.size() - 1) * _bytes(given[whole]) / group.size()


def _reduce(name: str) -> Callable[[Mapping[str, Any], dist.ProcessGroup], float]:
    return lambda given, group: 2 * (group.size() - 1) * _bytes(given[name]) / group.size()


def _all_to_all(splits: str) -> Callable[[Mapping[str, Any], dist.ProcessGroup], float]:
    def sent(given: Mapping[str, Any], group: dist.ProcessGroup) -> float:
        x = given["input"]
        if not given[splits]:
            return (group.size() - 1) * _bytes(x) / group.size()
        rows = sum(given[splits]) - given[splits][group.rank()]
        return _bytes(x) * rows / len(x) if rows else 0

    return sent


_SILENT = {"wait_tensor", "barrier", "monitored_barrier_", "recv_", "recv_any_source_"}
_SENT: Mapping[str, Callable[[Mapping[str, Any], dist.ProcessGroup], float]] = {
    "allreduce_": _reduce("tensors"),
    "all_reduce": _reduce("input"),
    "all_reduce_": _reduce("input"),
    "allreduce_coalesced_": _reduce("tensors"),
    "_allgather_base_": _gather("input_tensor"),
    "all_gather_into_tensor": _gather("input"),
    "allgather_into_tensor_coalesced_": _gather("inputs"),
    "_reduce_scatter_base_": _scatter("input_tensor"),
    "reduce_scatter_tensor": _scatter("input"),
    "reduce_scatter_tensor_coalesced_": _scatter("inputs"),
    "alltoall_base_": _all_to_all("input_split_sizes"),
    "all_to_all_single": _all_to_all("input_split_sizes"),
    "send": lambda given, group: _bytes(given["tensors"]),
}
_OPS = {
    "allreduce_": "all_reduce",
    "all_reduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
}
