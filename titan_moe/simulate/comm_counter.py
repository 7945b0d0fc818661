"""Count the bytes that a rank sends, at torch's dispatcher, while a program runs.

A collective counts with what has to leave the rank under the algorithm that moves least (a ring for
gathers and reductions, Patarasuk and Yuan 2009): an all-gather of n own bytes among P ranks sends
(P - 1) n, a reduce-scatter that leaves n bytes likewise, an all-reduce of n bytes both halves,
2 (P - 1) n / P; an all-to-all sends all but the rank's own rows. Receiving counts nothing.
"""

import sys
import traceback
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
_GIVEN = ("input_tensor", "input", "inputs", "tensors", "input_tensors", "tensor")
"""Names of the argument that a rank brings."""


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
        if _name(func) not in _OPS:
            raise NotImplementedError(f"the bytes of {func} are not known")
        op = op_of(func)
        if op not in _BYTES_SENT:
            return
        named = arguments_of(func, args)
        group, num_bytes = group_of(named), sum(x.nbytes for x in given_tensors(named))
        more = _BYTES_SENT[op](num_bytes, group.size(), group.rank(), named)
        if op == "all_to_all" and _called_by_fsdp():
            op = "reduce_scatter"  # gloo makes it of an exchange of as many bytes, and a sum.
        flow = Flow(self._axis(group), op)
        calls, sent = self._sent.get(flow, Volume())
        self._sent[flow] = Volume(calls + 1, sent + more)

    def volumes(self) -> dict[Flow, Volume]:
        """Returns all that was counted."""
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
        # A joined axis of the size of one that it joins is that one.
        joined = [meshes.dims.size(each) for each in DERIVED_AXES.get(axis, ())]
        if size == 1 or (axis == "sequence" and size in joined):
            continue
        for group in meshes.known_groups(axis):
            names.setdefault(group.group_name, []).append(axis)
    world = dist.group.WORLD
    assert world is not None
    return {world.group_name: WORLD} | {name: "+".join(axes) for name, axes in names.items()}


def op_of(func: Any) -> str:
    """Returns the name of a collective in reports, the same for all forms of one operation."""
    return _OPS.get(_name(func), _name(func))


def _name(func: Any) -> str:
    return func.__name__.partition(".")[0]


def arguments_of(func: Any, args: tuple) -> dict[str, Any]:
    """Returns a collective's positional arguments by name."""
    return dict(zip([a.name for a in func._schema.arguments], args, strict=False))


def given_tensors(named: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors that a rank gives to a collective."""
    given = next(named[each] for each in _GIVEN if each in named)
    return [given] if isinstance(given, Tensor) else list(given)


def group_of(named: Mapping[str, Any]) -> dist.ProcessGroup:
    """Returns the group among a collective's arguments, in whichever form it is passed."""
    group = named.get("process_group", named.get("group_name"))
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    if isinstance(group, torch.ScriptObject):
        return dist.ProcessGroup.unbox(group)
    assert isinstance(group, dist.ProcessGroup), f"no group among {sorted(named)}"
    return group


def _called_by_fsdp() -> bool:
    frames = traceback.walk_stack(sys._getframe(1))
    return any(_FSDP in frame.f_code.co_filename for frame, _ in frames)


_OPS: Mapping[str, str] = {
    "wait_tensor": "wait",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    "recv_": "receive",
    "recv_any_source_": "receive",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "gather_": "gather",
    "send": "send",
}
"""Operation -> what it is called here."""


def _exchanged(num_bytes: int, num_ranks: int, rank: int, named: Mapping[str, Any]) -> float:
    splits = named["input_split_sizes"]
    if not splits:
        return (num_ranks - 1) * num_bytes / num_ranks
    sent = sum(splits) - splits[rank]
    return num_bytes * sent / len(named["input"]) if sent else 0


_BYTES_SENT: Mapping[str, Callable[[int, int, int, Mapping[str, Any]], float]] = {
    "all_reduce": lambda n, ranks, *_: 2 * (ranks - 1) * n / ranks,
    "all_gather": lambda n, ranks, *_: (ranks - 1) * n,
    "reduce_scatter": lambda n, ranks, *_: (ranks - 1) * n / ranks,
    "all_to_all": _exchanged,
    "broadcast": lambda n, ranks, rank, named: (rank == named["root_rank"]) * (ranks - 1) * n,
    "gather": lambda n, ranks, rank, named: (rank != named["root_rank"]) * n,
    "send": lambda n, *_: n,
}
"""Name of a collective -> the bytes that a rank sends, from those of the tensors that it gives, the
size of the group, the rank's number in it, and all arguments; others send nothing."""
