"""Stand-ins for kernels that are compiled when they are called: Triton's and flex attention."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from scripts.rehearsal.fake_cuda import FakeCuda, value_of
from scripts.rehearsal.ledger import Finding
from scripts.rehearsal.limits import refuse
from scripts.rehearsal.places import here
from titan_moe.comm import symmetric_memory
from titan_moe.ops.move_rows import add_rows_reference, copy_rows_reference
from titan_moe.ops.permute_indices import (
    copies_to_ranks_reference,
    permute_indices_reference,
    sort_by_expert_reference,
)


@contextmanager
def stand_ins(mode: FakeCuda) -> Iterator[None]:
    """Counts and checks launches of Triton kernels and flex attention instead of compiling them."""
    import torch.distributed._symmetric_memory as symm_mem
    from torch.nn.attention import flex_attention as flex
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        # Other keywords, such as num_warps, are for Triton.
        own = {name: value for name, value in kwargs.items() if name in self.arg_names}
        named = inspect.signature(self.fn).bind(*args, **own).arguments
        tensors = [x for x in named.values() if isinstance(x, Tensor)]
        takes_strides = any(name.endswith("_stride") for name in named)
        _check(mode, self.fn.__name__, tensors, contiguous=not takes_strides)
        mode.ledger.kernel(sum(x.nbytes for x in tensors))
        if compute := _VALUES.get(self.fn.__name__):
            values = {k: value_of(x) if isinstance(x, Tensor) else x for k, x in named.items()}
            with _disable_current_modes():  # Not to be counted.
                compute(values)

    @torch.compiler.disable
    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        mask = options.get("block_mask")
        tensors = [x for x in tree_leaves((query, key, value, vars(mask))) if isinstance(x, Tensor)]
        _check(mode, "flex_attention", tensors, contiguous=False)
        refuse("flex_attention", query, key, value)
        out, lse = _Attention.apply(query, key, value, mode)
        return (out, flex.AuxOutput(lse=lse)) if options.get("return_aux") else out

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(flex, "flex_attention", attend),
        mock.patch.object(symmetric_memory, "_allocate", _zeros),
        mock.patch.object(symm_mem, "get_symm_mem_workspace"),
        _without_nvshmem(),
    ):
        yield


def _check(mode: FakeCuda, name: str, tensors: list[Tensor], *, contiguous: bool) -> None:
    """Notes tensors of the host and tensors with gaps: a kernel would read other memory."""
    for x in tensors:
        if not x.is_cuda or not isinstance(x, FakeTensor):
            finding = Finding("wrong device", here(), f"{name} reads a tensor on {x.device}")
            mode.ledger.findings.append(finding)
        elif contiguous and not x.is_contiguous():
            finding = Finding("layout", here(), f"{name} reads a tensor that is not contiguous")
            mode.ledger.findings.append(finding)


# --- symmetric memory ---


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: Any) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@contextmanager
def _without_nvshmem() -> Iterator[None]:
    """Registers a kernel of torch's exchange, which is CUDA's alone, for fake tensors: it checks
    its arguments and moves nothing."""

    def exchange(
        input: Tensor, out: Tensor, in_splits: Tensor, out_splits_offsets: Tensor, group_name: str
    ) -> None:
        buffers = input, out, in_splits, out_splits_offsets
        assert all(x.is_contiguous() and x.device.type == "meta" for x in buffers), "not on the GPU"
        assert input.dtype is out.dtype and input.stride(0) == out.stride(0), "unequal rows"

    library = torch.library.Library("symm_mem", "IMPL", "Meta")
    library.impl("all_to_all_vdev", exchange)
    try:
        yield
    finally:
        library._destroy()


# --- values of whole numbers that Triton kernels write ---


def _copied(named: Mapping[str, Any]) -> None:
    if named["x_ptr"] is not None and named["source_ptr"] is not None:
        named["out_ptr"].copy_(copy_rows_reference(named["x_ptr"], named["source_ptr"]))


def _added(named: Mapping[str, Any]) -> None:
    if named["y_ptr"] is not None and named["rows_ptr"] is not None:
        given = named["y_ptr"], named["rows_ptr"], named["other_ptr"]
        named["out_ptr"].copy_(add_rows_reference(*given))


def _permuted(named: Mapping[str, Any]) -> None:
    if named["counts_ptr"] is None:
        return
    found = permute_indices_reference(
        named["counts_ptr"],
        num_rows=named["num_rows"],
        row_alignment=named["ALIGNMENT"],
        max_rows=named["max_rows"],
    )
    outputs = ("source_ptr", "position_ptr", "offsets_ptr")
    for name, value in zip(outputs, found, strict=True):
        named[name].copy_(value)


def _counted(named: Mapping[str, Any]) -> None:
    experts, counts = named["experts_ptr"], named["counts_ptr"]
    if experts is not None:  # All as if by the first program.
        keys = (experts // named["DIVISOR"]).flatten()
        counts.zero_()[0] = keys.bincount(minlength=named["KEYS"])


def _ordered(named: Mapping[str, Any]) -> None:
    experts, keys = named["experts_ptr"], named["NUM_KEYS"]
    if experts is None:
        return
    found: tuple[Tensor, ...]
    if named["ONCE"]:
        found = copies_to_ranks_reference(experts, named["DIVISOR"], keys)
        outputs = ["source_ptr", "rows_ptr", "slots_ptr", "totals_ptr"]
    else:
        found = sort_by_expert_reference(experts, keys)
        outputs = ["source_ptr", "slots_ptr", "rows_ptr", "totals_ptr"]
    for name, value in zip(outputs, found, strict=True):
        named[name].copy_(value)


_VALUES: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "_copy_rows_kernel": _copied,
    "_add_rows_kernel": _added,
    "_permute_indices_kernel": _permuted,
    "_count_kernel": _counted,
    "_order_kernel": _ordered,
}


# --- flex attention: a kernel forward, two backward ---


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, mode: FakeCuda
    ) -> tuple[Tensor, Tensor]:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mode = mode  # type: ignore[attr-defined]
        _note(mode, query, key, value, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, grad_lse: Tensor):  # type: ignore[override, no-untyped-def]
        query, key, value, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (query, key, value)]
        _note(ctx.mode, out, grad, lse)
        _note(ctx.mode, query, key, value, grad, lse, *grads)
        return *grads, None


def _note(mode: FakeCuda, *tensors: Tensor) -> None:
    mode.ledger.kernel(sum(x.nbytes for x in tensors))
