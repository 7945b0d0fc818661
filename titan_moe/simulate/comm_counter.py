"""Count the bytes that a rank sends, at torch's dispatcher, while a program runs.

A collective counts with what has to leave the rank under the algorithm that moves least (a ring for
gathers and reductions, Patarasuk and Yuan 2009): an all-gather of n own bytes among P ranks sends
(P - 1) n, a reduce-scatter that leaves n bytes likewise, an all-reduce of n bytes both halves,
2 (P - 1) n / P; an all-to-all sends all but the rank's own part. Receiving counts nothing.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe.distributed.parallel_dims import DERIVED_AXES, Meshes

COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of the operations that communicate."""
WORLD = "world"
_EXCHANGED_OVER = ("pp", "cp", "tp", "sequence", "ep", "etp", "dp_replicate", "fsdp", "edp")
_FSDP = "/torch/distributed/fsdp/"
_BytesSent = Callable[[Mapping[str, Any], dist.ProcessGroup], float]


class Flow(NamedTuple):
    """Holds the key by which calls and bytes are summed."""

    axis: str
    """The mesh axes whose group it is; "world" for sums of a step's scalars and counts."""
    op: str


class Volume(NamedTuple):
    """Holds the number of calls and the bytes that left this rank."""

    calls: int = 0
    bytes: float = 0.0


class CommCounter(TorchDispatchMode):
    """Counts every collective of the thread that it is entered in, backward included (which a CPU
    runs in the same thread); changes nothing.

    Nothing is counted while `groups` is empty, so that groups may be made under the mode. Raises
    NotImplementedError at a collective whose bytes are not known, rather than leave it out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[str, str] = {}
        """Group name -> its axes, as `axes_of_groups` has them; others go by their description."""
        self._sent: dict[Flow, Volume] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls again, with its local tensors.
        if func.namespace in COLLECTIVES and self.groups:
            self.count(func, args)
        return self.execute(func, args, kwargs or {})

    def execute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operation; a subclass may do it otherwise."""
        return func(*args, **kwargs)

    def count(self, func: Any, args: tuple) -> None:
        """Add one call."""
        name = _name(func)
        if name not in _OPS:
            raise NotImplementedError(f"the bytes of {func} are not known")
        op, bytes_sent = _OPS[name]
        if bytes_sent is None:
            return
        if op == "all_to_all" and _called_by_fsdp():
            op = "reduce_scatter"  # gloo makes it of an exchange of as many bytes, and a sum.
        named = arguments_of(func, args)
        group = group_of(named)
        flow = Flow(self._axis(group), op)
        calls, sent = self._sent.get(flow, Volume())
        self._sent[flow] = Volume(calls + 1, sent + bytes_sent(named, group))

    def volumes(self) -> dict[Flow, Volume]:
        """All that was counted."""
        return dict(sorted(self._sent.items()))

    def clear(self) -> None:
        """Forget what was counted."""
        self._sent.clear()

    def _axis(self, group: dist.ProcessGroup) -> str:
        # The world's group serves the sums that end a step and, where all ranks shard them,
        # parameters.
        if group is dist.group.WORLD and not _called_by_fsdp():
            return WORLD
        return self.groups.get(group.group_name, group.group_desc)


def axes_of_groups(meshes: Meshes) -> dict[str, str]:
    """Group name -> the names of the axes that it serves, "+" between them; makes no group."""
    names: dict[str, list[str]] = {}
    for axis in _EXCHANGED_OVER:
        size = meshes.dims.size(axis)
        # A joined axis of one of its parts' size is that part.
        parts = [meshes.dims.size(part) for part in DERIVED_AXES.get(axis, ())]
        if size == 1 or (axis == "sequence" and size in parts):
            continue
        if group := meshes.known_group(axis):
            names.setdefault(group.group_name, []).append(axis)
    world = dist.group.WORLD
    assert world is not None
    return {world.group_name: WORLD} | {name: "+".join(axes) for name, axes in names.items()}


def op_of(func: Any) -> str:
    """Returns the name of a collective in reports, the same for all forms of one operation."""
    name = _name(func)
    return _OPS[name][0] if name in _OPS else name


def _name(func: Any) -> str:
    return func.__name__.partition(".")[0]


def arguments_of(func: Any, args: tuple) -> dict[str, Any]:
    """A collective's positional arguments by name."""
    return dict(zip([a.name for a in func._schema.arguments], args, strict=False))


def group_of(named: Mapping[str, Any]) -> dist.ProcessGroup:
    """The group among a collective's arguments, in whichever form it is passed."""
    group = named.get("process_group", named.get("group_name"))
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    if isinstance(group, torch.ScriptObject):
        return dist.ProcessGroup.unbox(group)
    assert isinstance(group, dist.ProcessGroup), f"no group among {sorted(named)}"
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


def _gather(own: str) -> _BytesSent:
    return lambda named, group: (group.size() - 1) * _bytes(named[own])


def _scatter(whole: str) -> _BytesSent:
    return lambda named, group: (group.size() - 1) * _bytes(named[whole]) / group.size()


def _reduce(name: str) -> _BytesSent:
    return lambda named, group: 2 * (group.size() - 1) * _bytes(named[name]) / group.size()


def _all_to_all(splits: str) -> _BytesSent:
    def sent(named: Mapping[str, Any], group: dist.ProcessGroup) -> float:
        x = named["input"]
        if not named[splits]:
            return (group.size() - 1) * _bytes(x) / group.size()
        rows = sum(named[splits]) - named[splits][group.rank()]
        return _bytes(x) * rows / len(x) if rows else 0

    return sent


def _rooted(name: str, *, sends: bool) -> _BytesSent:
    """Counts the bytes between the root and every other rank."""

    def sent(named: Mapping[str, Any], group: dist.ProcessGroup) -> float:
        if sends != (group.rank() == named["root_rank"]):
            return 0.0
        return _bytes(named[name]) * (group.size() - 1 if sends else 1)

    return sent


_OPS: Mapping[str, tuple[str, _BytesSent | None]] = {
    "wait_tensor": ("wait", None),
    "barrier": ("barrier", None),
    "monitored_barrier_": ("barrier", None),
    "recv_": ("receive", None),
    "recv_any_source_": ("receive", None),
    "allreduce_": ("all_reduce", _reduce("tensors")),
    "all_reduce": ("all_reduce", _reduce("input")),
    "all_reduce_": ("all_reduce", _reduce("input")),
    "allreduce_coalesced_": ("all_reduce", _reduce("tensors")),
    "allgather_": ("all_gather", _gather("input_tensors")),
    "_allgather_base_": ("all_gather", _gather("input_tensor")),
    "all_gather_into_tensor": ("all_gather", _gather("input")),
    "allgather_into_tensor_coalesced_": ("all_gather", _gather("inputs")),
    "_reduce_scatter_base_": ("reduce_scatter", _scatter("input_tensor")),
    "reduce_scatter_tensor": ("reduce_scatter", _scatter("input")),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _scatter("inputs")),
    "alltoall_base_": ("all_to_all", _all_to_all("input_split_sizes")),
    "all_to_all_single": ("all_to_all", _all_to_all("input_split_sizes")),
    "broadcast_": ("broadcast", _rooted("tensors", sends=True)),
    "gather_": ("gather", _rooted("input_tensors", sends=False)),
    "send": ("send", lambda named, group: _bytes(named["tensors"])),
}
"""Operation -> what it is called here, and the bytes that it sends; None: it sends nothing."""
