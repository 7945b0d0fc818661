"""A rank that records every collective it issues, and that gets whole numbers from the other ranks.

Tensors of floats have no values in a fake world, and what a collective does to them needs no other
rank. Whole numbers are real: how many rows a rank receives follows from the routing of others, so
their collectives wait until all members of the group have come.
"""

from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from titan_moe.simulate.comm_counter import (
    COLLECTIVES,
    arguments_of,
    given_tensors,
    group_of,
    op_of,
)
from titan_moe.simulate.fake_rank import FakeCommCounter, fake_collective
from titan_moe.simulate.lockstep import Meeting, Peers
from titan_moe.simulate.whereabouts import Place, Whereabouts

_WAIT = "wait_tensor"
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda values: values.sum(0),
    "min": lambda values: values.amin(0),
    "max": lambda values: values.amax(0),
}


class Issued(NamedTuple):
    """A collective, or a send or receive, as one rank issues it."""

    group: str
    """The group's name, the same on all of its ranks."""
    op: str
    dtype: str
    sizes: tuple[int, ...]
    """Elements of each tensor; of an all-to-all with split sizes, none."""
    sends: tuple[int, ...]
    """Elements to each rank of the group, of an all-to-all with split sizes."""
    receives: tuple[int, ...]
    peer: int
    """The other rank in the group, of a send or receive; a broadcast's root; else -1."""
    tag: int
    place: Place
    number: int = 0
    """Number of operations that the rank issued before, in any group."""

    @property
    def is_pair(self) -> bool:
        return self.op in ("send", "receive")

    @property
    def rule(self) -> tuple:
        """Returns what must be the same on every rank of the group. A collective's phase, layer and
        region belong to it: two sums of equal size in exchanged order raise no error, and are
        wrong."""
        if self.is_pair:
            return self.dtype, self.sizes, self.tag
        place = self.place
        return self.op, self.dtype, self.sizes, self.peer, place.phase, place.layer, place.region

    def __str__(self) -> str:
        sizes = " + ".join(map(str, self.sizes)) if not self.sends else ""
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"{self.op} {self.dtype}" + (f"[{sizes}]" if sizes else "") + tag


class RecordingRank(FakeCommCounter):
    """Records what is issued; of whole numbers, exchanges them with `peers`."""

    def __init__(self, peers: Peers, whereabouts: Whereabouts) -> None:
        super().__init__()
        self.issued: list[Issued] = []
        self._peers, self._whereabouts = peers, whereabouts
        self._met: Counter[str] = Counter()

    def execute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func.namespace not in COLLECTIVES or func.__name__.startswith(_WAIT):
            return super().execute(func, args, kwargs)
        named = arguments_of(func, args)
        group = group_of(named)
        issued = self._described(func, named, group)
        self.issued.append(issued)
        self._met[issued.group] += not issued.is_pair
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        is_alone = group.size() == 1 and "output_tensors" not in named
        has_no_values = issued.op == "barrier" or any(isinstance(x, FakeTensor) for x in tensors)
        if issued.is_pair or has_no_values or is_alone:
            return fake_collective(func, args)
        return self._among_peers(func, args, named, issued, group)

    def taken(self) -> list[Issued]:
        """Returns the operations issued since the last call."""
        issued, self.issued = self.issued, []
        return issued

    def _described(self, func: Any, named: dict[str, Any], group: dist.ProcessGroup) -> Issued:
        op, tensors = op_of(func), given_tensors(named)
        sends, receives = _splits(named) if op == "all_to_all" else ((), ())
        return Issued(
            group=group.group_name,
            op=op,
            dtype=str(tensors[0].dtype).removeprefix("torch."),
            sizes=() if sends else tuple(x.numel() for x in tensors),
            sends=sends,
            receives=receives,
            peer=named.get("dst", named.get("src", named.get("root_rank", -1))),
            tag=named.get("tag", 0),
            place=self._whereabouts.now(),
            number=len(self.issued),
        )

    def _among_peers(
        self, func: Any, args: tuple, named: dict[str, Any], issued: Issued, group: Any
    ) -> Any:
        """Runs the collective itself, of real numbers."""
        (x,) = given_tensors(named)
        members = tuple(dist.get_process_group_ranks(group))
        key = issued.group, self._met[issued.group], issued.op
        value = (x.numpy(), named.get("input_split_sizes"))
        values = self._peers.exchange(Meeting(key, members), value)
        me, theirs = group.rank(), [torch.from_numpy(value) for value, _ in values]
        if issued.op == "all_to_all":
            splits = [splits or [len(x) // len(members)] * len(members) for _, splits in values]
            result = torch.cat([x.split(s)[me] for x, s in zip(theirs, splits, strict=True)])
        elif "output_tensors" in named:  # Only the rank that gathers has outputs.
            for outputs in named["output_tensors"]:
                for output, each in zip(outputs, theirs, strict=True):
                    output.copy_(each.view(output.shape))
            return fake_collective(func, args)
        elif issued.op == "all_gather":
            result = torch.cat([each.view(len(x), *x.shape[1:]) for each in theirs])
        elif issued.op == "all_reduce":
            result = _REDUCTIONS[_reduction(named["reduce_op"])](torch.stack(theirs))
        elif issued.op == "broadcast":
            result = theirs[issued.peer]
        else:
            raise NotImplementedError(f"{func} of whole numbers in a fake world")
        if func.namespace != "c10d":
            return result
        outcome = fake_collective(func, args)
        target = named.get("output", named.get("output_tensor", x))
        target.copy_(result.view(target.shape))
        return outcome


def _reduction(op: Any) -> str:
    """Returns the name of a reduction, which torch passes in several forms."""
    return op if isinstance(op, str) else dist.ReduceOp.RedOpType(op.op()).name.lower()


def _splits(named: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns elements sent to and received from each rank; empty if the ranks' shares are
    equal."""
    sent, received = named["input_split_sizes"], named["output_split_sizes"]
    row = prod(named["input"].shape[1:])
    return tuple(n * row for n in sent), tuple(n * row for n in received)
