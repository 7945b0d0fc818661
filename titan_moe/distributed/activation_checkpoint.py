"""Recompute a block's activations in the backward instead of keeping them.

The recomputation replays the decisions of the forward pass (`DecisionMemo`): the experts of tokens,
and the keys that sparse attention sees. It must not add to a buffer, which would count twice in the
step's sums: that is an error.

Recomputing by operation keeps attention with all it does (its kernel, its collectives under context
parallelism), every matrix product, and the result of every collective that moves rows or adds
partial sums; only the cheap rest runs again. All products are kept, not every second one: which
ones are kept would otherwise depend on how many experts a rank holds, and the point is that the
backward neither multiplies nor communicates anew. For less memory, recompute
whole layers.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import titan_moe.ops.grouped_mm  # noqa: F401  Registers its operation.
from titan_moe.comm.collectives import keeping_exchanges, never_kept
from titan_moe.config.job_config import ActivationCheckpoint
from titan_moe.moe.decisions import DecisionMemo
from titan_moe.ops.varlen_attention import varlen_operation

# Not all-gathers: what they return is as large as all ranks' parts together, and FSDP's are
# parameters.
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.mm.dtype,
    torch.ops.aten.addmm.default,
    torch.ops.titan_moe.grouped_mm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_grouped_mm.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
}

_ATTENTION = {
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}

Contexts = tuple[AbstractContextManager, AbstractContextManager]


def is_recomputed_whole(layer: int, section: ActivationCheckpoint) -> bool:
    """Returns whether the layer of this number in the whole model is recomputed whole."""
    return section.every > 0 and layer % section.every == 0


def apply_activation_checkpoint(
    model: Any, section: ActivationCheckpoint, *, compiled: bool = False
) -> None:
    """Put `Recomputed` around the decoder's blocks that the section names.

    Args:
        section: which layers, and whether whole or by operation. Every n-th layer is the same one
            however a pipeline cuts the model.
        compiled: whether blocks are compiled: they recompute by operation within their graphs.
    """
    if section.by_operation and compiled:
        return
    for name, block in model.blocks().items():
        if section.by_operation or is_recomputed_whole(block.layer, section):
            model.set_submodule(name, Recomputed(block, section, compiled=compiled))


class Recomputed(CheckpointWrapper):
    """Runs a block, compiled or not, and runs it again in the backward.

    It stands in the block's place: parameters, buffers and modules inside have the names that they
    have without it, and hooks on a module of the block's name are this one's, so that they do not
    run again. torch's wrapper does so for the names in state dicts.

    Args:
        section: tells what is kept, not computed again.
        compiled: whether the block is compiled: no `KeptAttention` is around its attention.
    """

    def __init__(
        self, block: nn.Module, section: ActivationCheckpoint, *, compiled: bool = False
    ) -> None:
        # No random numbers are drawn inside a block, so there is no generator state to keep.
        super().__init__(block, preserve_rng_state=False, context_fn=self._contexts)
        self.section, self.compiled = section, compiled
        assert not list(block.parameters(recurse=False)), "named_modules leaves the block out"
        self._buffers = block._buffers  # As named_modules shows this module in the block's place.
        # Each has its own order of decisions: a kept attention replays none.
        self.memos = [module for module in block.modules() if isinstance(module, DecisionMemo)]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        inside = self._checkpoint_wrapped_module.named_modules(memo, prefix, remove_duplicate)
        for name, module in inside:
            yield name, self if module is self._checkpoint_wrapped_module else module

    def _load_from_state_dict(self, *args: Any) -> None:
        # torch's wrapper renames what is loaded to the block's names, and leaves nothing to itself.
        buffers, self._buffers = self._buffers, {}
        super()._load_from_state_dict(*args)
        self._buffers = buffers

    def _contexts(self) -> Contexts:
        pairs = [memo.contexts() for memo in self.memos]
        if self.section.by_operation:
            pairs.append(_kept_results(_KEPT))
        elif self.section.keep_attention:
            modes = _kept_results(_ATTENTION | {varlen_operation()})
            # A mode in Python costs the host more than most operations it sees: not around all.
            narrow = _around_graphs if self.compiled else _around_attention
            pairs.append((narrow(modes[0]), narrow(modes[1])))
        if self.section.by_operation or self.section.keep_exchanged_rows:
            pairs.append(kept_exchanges())
        records = [record for record, _ in pairs]
        replays = [replay for _, replay in pairs]
        return _entered(records), _entered([*replays, _unchanged(self._counters)])

    @cached_property  # Not before the first forward: the model has no memory yet.
    def _counters(self) -> dict[str, Tensor]:
        return dict(self.named_buffers())


@contextmanager
def _unchanged(buffers: Mapping[str, Tensor]) -> Iterator[None]:
    """Raises RuntimeError when a buffer was written to."""
    versions = {name: buffer._version for name, buffer in buffers.items()}
    try:
        yield
    finally:  # torch ends a recomputation early by an exception of its own.
        changed = [name for name, buffer in buffers.items() if buffer._version != versions[name]]
        if changed:
            raise RuntimeError(
                f"a recomputed forward changed {', '.join(changed)}, which would count twice: add "
                "to it as metrics/step_metrics.py explains"
            )


@contextmanager
def _entered(contexts: list[AbstractContextManager]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _kept_results(operations: set[Any]) -> "tuple[_Keep, _Keep]":
    """Returns modes for a forward that keeps results and a recomputation that reuses them.

    torch's own pair (create_selective_checkpoint_contexts) counts the calls of each operation, and
    wants the same in a recomputation. Here FSDP gathers again, and replayed decisions exchange no
    counts: tests/distributed/test_recompute.py shows what torch makes of that.
    """
    kept: dict[Any, deque] = defaultdict(deque)
    return _Keep(kept, operations), _HandBack(kept, operations)


def kept_exchanges() -> Contexts:
    """Returns contexts for a forward that keeps the rows that it receives, and a recomputation that
    exchanges none."""
    kept: deque[Tensor] = deque()

    def keep(start: Callable[[Tensor], Tensor], x_RD: Tensor) -> Tensor:
        received = start(x_RD)
        kept.append(received.detach())
        return received

    def hand_back(start: Callable[[Tensor], Tensor], x_RD: Tensor) -> Tensor:
        return kept.popleft()

    return keeping_exchanges(keep), keeping_exchanges(hand_back)


class KeptAttention:
    """An attention core, or a recurrence, whose results a recomputation may keep."""

    def __init__(self, core: Any) -> None:
        self.core, self.mask = core, core.mask

    @property
    def convolve(self) -> Callable[..., Tensor]:
        """Convolves for a recurrence, in every recomputation."""
        return self.core.convolve

    def __call__(self, *args: Any) -> Tensor:
        attend = _attend.get()
        return self.core(*args) if attend is None else attend(self.core, *args)


Attend = Callable[..., Tensor]
# Calls an attention core. The innermost of this thread: autograd may recompute in a thread of its
# own.
_attend: ContextVar[Attend | None] = ContextVar("_attend", default=None)


@contextmanager
def _around_attention(mode: "_Keep") -> Iterator[None]:
    """Enters a mode around the calls of attention alone."""

    def attend(core: Callable[..., Tensor], *args: Any) -> Tensor:
        with mode:
            return core(*args)

    before = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(before)


_entered_mode: ContextVar["_Keep | None"] = ContextVar("_entered_mode", default=None)


@contextmanager
def _around_graphs(mode: "_Keep") -> Iterator[None]:
    """Enters a mode around a compiled block, whose graphs attend, but for `outside_graphs`."""
    before = _entered_mode.set(mode)
    try:
        with mode:
            yield
    finally:
        _entered_mode.reset(before)


@contextmanager
def outside_graphs() -> Iterator[None]:
    """Leaves the mode of `_around_graphs` for what a compiled block does itself."""
    mode = _entered_mode.get()
    if mode is None:
        yield
        return
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()


class _Keep(TorchDispatchMode):
    """Keeps attention, and the results of `operations` in the order of their calls."""

    def __init__(self, kept: dict[Any, deque], operations: set[Any]) -> None:
        super().__init__()
        self.kept, self.operations = kept, operations
        self.inside_attention = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # Else torch.compile gives up on a compiled attention inside.

    def __enter__(self) -> "_Keep":
        self._before = _attend.set(self.attention)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _attend.reset(self._before)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func in self.operations and not self.inside_attention:
            # Detached: autograd is about to give the result itself a history that would hold us.
            self.kept[func].append(tree_map_only(Tensor, Tensor.detach, result))
        return result

    def attention(self, core: Callable[..., Tensor], *args: Any) -> Tensor:
        """Calls `core` and keeps its output; its backward finds its saved tensors without a
        recomputation."""
        self.inside_attention = True
        with saved_tensors_hooks(Tensor.detach, lambda saved: saved), never_kept():
            o_BHSC = core(*args)
        self.inside_attention = False
        self.kept["attention"].append(o_BHSC.detach())
        return o_BHSC


class _HandBack(_Keep):
    """Hands each kept result back, once, instead of computing it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in self.operations:
            return self.kept[func].popleft()
        return func(*args, **(kwargs or {}))

    def attention(self, core: Callable[..., Tensor], *args: Any) -> Tensor:
        """Returns the kept output. It needs a gradient, so that later operations save as before."""
        return self.kept["attention"].popleft().requires_grad_()
