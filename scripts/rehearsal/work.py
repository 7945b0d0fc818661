"""What an operation costs a device, and which part of a step it belongs to.

A part is a phase, a region of profiling/regions.py and a kind of work. Phases are "forward",
"recompute" and "backward"; what follows the last backward counts as "forward" of its region, such
as "optimizer". FSDP's own work is the region "fsdp", whichever layer it is for.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.rehearsal.kinds import ATTENTION, ELEMENTWISE, FLOAT8, FLOAT32, GROUPED, MATMUL, ROWS
from scripts.rehearsal.places import place_of
from titan_moe.profiling import regions

_CHECKPOINT = "/torch/utils/checkpoint.py"
_DYNAMO, _DISABLES = "/torch/_dynamo/eval_frame.py", "/torch/_compile.py"
_COMPILED = {"compile_wrapper": True, "_fn": False}
"""Functions of Dynamo's that call one that is compiled, or one that torch.compiler.disable keeps
from it."""
OUTSIDE = "other"
"""The region of what is in none: norms, residual sums, gradients that are accumulated."""

_GROUPED = {"_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"}
_MATMULS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_scaled_mm", "_scaled_mm_v2"}
_ATTENTIONS = ("flex_attention", "_flash_attention", "_scaled_dot_product", "_cudnn_attention")
_READS_ROWS = {"embedding", "gather", "index", "index_select"}
_WRITES_ROWS = {"index_add_", "index_copy_", "index_put_", "_index_put_impl_", "scatter_"}
_WRITES_ROWS |= {"scatter_add_", "scatter_reduce_"}
_ROWS = {
    *_READS_ROWS, *_WRITES_ROWS, "bincount", "cumsum", "embedding_dense_backward", "histc",
    "index_add", "index_put", "repeat_interleave", "scatter", "scatter_add", "searchsorted", "sort",
    "topk",
}  # fmt: skip
_ROW_FILES = {"move_rows_triton", "permute_indices_triton", "place_rows_triton"}
"""Of Triton kernels of ours."""
_ONLY_WRITES = {"_foreach_copy_", "_foreach_zero_", "copy_", "fill_", "zero_"}


class Part(NamedTuple):
    """What work is summed by."""

    phase: str
    region: str
    kind: str
    name: str
    """Of the operation or kernel; of what the host dispatches, none."""


class Link(NamedTuple):
    """What collectives are summed by."""

    phase: str
    region: str
    axis: str
    op: str
    ranks: int
    nodes: int
    """Nodes that the group's ranks are on."""


@dataclass
class Work:
    """Of one part; of a link, `bytes` leave the rank and `flops` is 0."""

    dispatches: float = 0
    kernels: float = 0
    bytes: float = 0
    flops: float = 0
    covered: dict[str, float] = field(default_factory=dict)
    """Of a link: what the device has to do between a start and its wait, in FLOPs of each kind that
    multiplies, and in bytes of all others."""

    def add(self, other: "Work", times: float = 1) -> None:
        self.dispatches += times * other.dispatches
        self.kernels += times * other.kernels
        self.bytes += times * other.bytes
        self.flops += times * other.flops
        for kind, amount in other.covered.items():
            self.covered[kind] = self.covered.get(kind, 0.0) + times * amount


Tally = dict[Part | Link, Work]


def added(*terms: tuple[Tally, float]) -> Tally:
    """The sum of tallies, each times its factor; what comes to nothing is left out."""
    total: Tally = defaultdict(Work)
    for tally, times in terms:
        for key, work in tally.items():
            total[key].add(work, times)
    return {
        key: work
        for key, work in total.items()
        if any(abs(x) > 1e-6 for x in (work.dispatches, work.kernels, work.bytes, work.flops))
    }


# --- costs ---


def kind_of(name: str, dtype: torch.dtype | None = None) -> str:
    """Of an operation or a kernel; `dtype` of a product's first factor."""
    if name in _GROUPED or name in _MATMULS:
        if "scaled" in name:
            return FLOAT8
        if dtype is not None and dtype.itemsize >= 4:
            return FLOAT32
        return GROUPED if name in _GROUPED else MATMUL
    if name.startswith(_ATTENTIONS):
        return ATTENTION
    return ROWS if name in _ROWS else ELEMENTWISE


def kind_of_kernel(module: str) -> str:
    """Of a Triton kernel of ours: some move rows, or find out where they go."""
    file = module.rpartition(".")[2]
    return ROWS if file in _ROW_FILES else ELEMENTWISE


def factors_of(name: str, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors of a product without what it is added to, which may be of another type."""
    return tensors[1:] if name in ("addmm", "addmm_", "baddbmm", "baddbmm_") else tensors


def flops_of(name: str, factors: list[Tensor]) -> float:
    """Of a matrix product of `factors_of`; 0 of any other operation. Padded rows count."""
    if name not in _GROUPED and name not in _MATMULS:
        return 0.0
    x, w = factors[:2]
    columns = w.shape[-1]
    # Of a product of experts with rows, each expert meets its own rows alone.
    share = len(x) if x.ndim == 3 and w.ndim == 2 else 1
    return 2.0 * x.numel() * columns / share


def attention_flops(query: Tensor, key: Tensor, value: Tensor) -> float:
    """Of a causal forward, [B, H, S, C]: half of all pairs, also with windows or documents."""
    pairs = prod(query.shape[:-1]) * key.shape[-2] / 2
    return 2.0 * pairs * (query.shape[-1] + value.shape[-1])


def attention_flops_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Of an operation of torch's, by its arguments; causal."""
    backward = "backward" in name
    query, key, value = args[1:4] if backward else args[:3]
    if name.startswith("_flash_attention"):  # Tokens stand before heads; lengths are arguments.
        longest = int(args[9 if backward else 6])
        left = kwargs.get("window_size_left")
        reach = longest if left is None or left < 0 else min(left + 1, longest)
        pairs = prod(query.shape[:-1]) * (reach - reach**2 / (2 * longest))
        forward = 2.0 * pairs * (query.shape[-1] + value.shape[-1])
    else:
        forward = attention_flops(query, key, value)
    return forward * (BACKWARD_OF_ATTENTION if backward else 1)


BACKWARD_OF_ATTENTION = 2.5
"""Products of its backward over those of its forward: scores anew, and four gradients."""


def bytes_of(name: str, tensors: list[Tensor], outputs: list[Tensor]) -> float:
    """That a kernel reads and writes at least: every tensor once, what it changes twice; of rows
    that are picked from a larger tensor, only these."""
    distinct = {id(x): x for x in tensors}
    read, written = sum(map(_bytes, distinct.values())), sum(map(_bytes, outputs))
    if name in _READS_ROWS:
        return 2 * written + sum(map(_bytes, tensors[1:]))
    if name in _WRITES_ROWS:
        return 2 * sum(map(_bytes, tensors[1:]))
    if name in _ONLY_WRITES:
        return read
    return read + written


def _bytes(x: Tensor) -> float:
    return x.numel() * x.element_size()


# --- parts ---


class Now(NamedTuple):
    """What an operation that is dispatched now belongs to."""

    phase: str
    region: str
    compiled: bool
    """Whether a function that torch.compile was given runs it, or it is the backward of one."""


class _Callers(NamedTuple):
    by_fsdp: bool
    recomputes: bool
    compiled: bool


class Whereabouts:
    """Tells what an operation belongs to: by who calls it, and in the backward by what made its
    node of autograd."""

    def __init__(self) -> None:
        self._inside: list[str] = []
        self._makers = regions.NodeMakers[tuple[str, bool]]()
        """Region, and whether it is compiled."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hear of every region that is entered, as a profiler would."""
        with regions.watched_by(self._entered):
            yield

    def now(self) -> Now:
        """Of the operation whose dispatch this is called from."""
        node = torch._C._current_autograd_node()
        callers = _callers(sys._getframe(1))
        inside = self._inside[-1] if self._inside else OUTSIDE
        if node is None:
            # The node of this operation, if it has one, is there already.
            self._makers.note((inside, callers.compiled), already=1)
            phase, compiled = "forward", callers.compiled
        elif callers.recomputes:
            phase, compiled = "recompute", callers.compiled
        else:
            phase, (inside, compiled) = "backward", self._makers.of(node) or (OUTSIDE, False)
        if callers.by_fsdp:
            return Now(phase, "fsdp", False)
        return Now(phase, inside, compiled)

    @contextmanager
    def _entered(self, name: str) -> Iterator[None]:
        self._inside.append(name)
        self._enters()
        try:
            yield
        finally:
            self._inside.pop()
            self._enters()

    def _enters(self) -> None:
        # A recomputation's nodes are never run: the backward is of the first ones.
        if torch._C._current_autograd_node() is None:
            inside = self._inside[-1] if self._inside else OUTSIDE
            before = self._makers.last()
            self._makers.note((inside, before[1] if before is not None else False))


def _callers(frame: FrameType | None) -> _Callers:
    caller, compiled = None, None
    while frame is not None:
        code = frame.f_code
        path, name = code.co_filename, code.co_name
        caller = caller or place_of(path, name)
        if compiled is None and path.endswith(_DYNAMO):
            compiled = _COMPILED.get(name) if not _is_torchs_own(frame) else None
        if name == "unpack_hook" and path.endswith(_CHECKPOINT):
            return _Callers(_is_fsdp(caller), True, bool(compiled))
        frame = frame.f_back
    return _Callers(_is_fsdp(caller), False, bool(compiled))


def _is_torchs_own(frame: FrameType) -> bool:
    """Whether it is torch that lets Dynamo look away: from a dispatch mode, for one."""
    return frame.f_back is not None and frame.f_back.f_code.co_filename.endswith(_DISABLES)


def _is_fsdp(caller: str | None) -> bool:
    return caller is not None and caller.startswith("torch/")
