"""Tensors on a GPU that is not there: shapes and devices for all, values for whole numbers.

The program's own kernels, its dispatch and torch's checks of devices and shapes run as they would
on CUDA, on FakeTensors of cuda:0. A dispatcher reads from whole numbers how many rows to send: so
each of those keeps its value beside it, computed on the CPU by the same operations.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from scripts.rehearsal.deterministic import is_refused
from scripts.rehearsal.ledger import Counts, Finding, Ledger, bytes_of
from scripts.rehearsal.limits import refuse
from scripts.rehearsal.places import here
from titan_moe.ops.operation import KERNELS
from titan_moe.simulate.comm_counter import COLLECTIVES, arguments_of, group_of
from titan_moe.simulate.fake_rank import FakeCommCounter, balanced_choice, fake_collective

CUDA = torch.device("cuda", 0)
_aten = torch.ops.aten
_ON_WAIT = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_MOST_VALUES = 1 << 24
"""Most elements of a tensor that keeps its values; a larger one, such as a mask, has none."""
_WAITS = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.unique_consecutive.default,
    _aten.equal.default,
}
_LAUNCHES_NOTHING = {
    "_local_scalar_dense", "_pin_memory", "_reshape_alias", "_unsafe_view", "_version", "alias",
    "as_strided", "detach", "empty", "empty_like", "empty_strided", "is_pinned", "is_same_size",
    "lift_fresh", "new_empty", "new_empty_strided", "record_stream", "resize_", "set_",
    "_has_compatible_shallow_copy_type", "sym_size", "sym_stride", "sym_numel", "size", "stride",
}  # fmt: skip


class FakeCuda(FakeCommCounter):
    """Runs and counts every dispatched operation; the ledger keeps copies, waits and findings."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    def execute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.prim.device.default:  # A query in Python, no operation.
            return getattr(args[0], "fake_device", None) or func(*args)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func.namespace == "titan_moe" and any(x.is_cuda for x in tensors):
            with self:  # Not dispatched without this mode.
                return _kernel_of(func)(*args, **kwargs)
        self.ledger.counts.dispatches += 1
        if func.namespace in COLLECTIVES:
            return self._communicate(func, args, tensors)
        if func is _aten.lift_fresh.default and tensors[0].is_cuda:
            return self._tensor_from_numbers(tensors[0])
        if _waits(func, args, kwargs):
            self.ledger.waited(func.__name__)
        if func is _aten._local_scalar_dense.default and isinstance(tensors[0], FakeTensor):
            return self._number(tensors[0])
        self._note_copy(func, args, kwargs)
        if func is _aten._pin_memory.default:
            return tensors[0]
        wanted = torch.device(kwargs.get("device") or "cpu")
        if wanted.type != "cuda" and not any(x.is_cuda for x in tensors):
            return super().execute(func, args, kwargs)
        refuse(func.__name__.partition(".")[0], *tensors[:3])
        if is_refused(func, args, kwargs):
            self.ledger.findings.append(Finding("not deterministic", here(), func.__name__))
        with self._fake:
            result = func(*args, **kwargs)
        self._note_kernel(func, tensors, result)
        self._give_values(func, args, kwargs, tensors, result)
        return result

    def counts(self) -> Counts:
        """Returns all counts so far; of collectives, those of this step."""
        volumes = self.volumes().values()
        return replace(
            self.ledger.counts,
            collectives=sum(each.calls for each in volumes),
            bytes_sent=sum(each.bytes for each in volumes),
        )

    # --- values of whole numbers ---

    def _number(self, x: FakeTensor) -> float | int | bool:
        if (value := value_of(x)) is not None:
            return value.item()
        return 1.0 if x.is_floating_point() else 1

    def _tensor_from_numbers(self, x: Tensor) -> Tensor:
        """Handles torch.tensor(..., device=cuda), for which torch has copied numbers and waited."""
        self.ledger.copied("cpu to cuda, torch.tensor")
        self.ledger.waited("torch.tensor on the device")
        with self._fake:
            made = torch.empty_like(x)
        made.value = x.cpu()  # type: ignore[attr-defined]
        return made

    def _give_values(
        self, func: Any, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor], result: Any
    ) -> None:
        made = [x for x in tree_leaves(result) if isinstance(x, FakeTensor) and _is_whole(x)]
        changes = func._schema.is_mutable
        if func is _aten.topk.default and not _is_whole(tensors[0]):
            made[0].value = _balanced(*args[:2])  # type: ignore[attr-defined]
            return
        if not made and not changes:
            return
        if any(value_of(x) is None for x in tensors) or any(x.numel() > _MOST_VALUES for x in made):
            for x in made:
                x.value = None  # type: ignore[attr-defined]
            return
        values = tree_map(_as_value, (args, kwargs))
        on_host = values[1] | ({"device": "cpu"} if "device" in values[1] else {})
        on_host.pop("pin_memory", None)
        outcome = func(*values[0], **on_host)
        for x, value in zip(tree_leaves(result), tree_leaves(outcome), strict=True):
            if isinstance(x, FakeTensor) and _is_whole(x):
                x.value = value  # type: ignore[attr-defined]

    # --- what is noted ---

    def _communicate(self, func: Any, args: tuple, tensors: list[Tensor]) -> Any:
        name = func.__name__.partition(".")[0]
        if name == "wait_tensor":
            return tensors[0]
        group = group_of(arguments_of(func, args))
        self.ledger.communicated(name, group, {x.device.type for x in tensors})
        values = tree_map(_as_value_if_known, args)
        known = {id(value_of(x)): x for x in tensors if value_of(x) is not None}
        outcome = fake_collective(func, values)

        def back(x: Any) -> Any:
            if not isinstance(x, Tensor) or isinstance(x, FakeTensor):
                return x
            return known[id(x)] if id(x) in known else self.on_device(x)

        return tree_map(back, outcome)

    def on_device(self, value: Tensor) -> Tensor:
        """Returns a fake tensor on the GPU that keeps this value."""
        with self._fake:
            made = torch.empty(value.shape, dtype=value.dtype, device=CUDA)
        made.value = value  # type: ignore[attr-defined]
        return made

    def _note_copy(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if func is _aten._to_copy.default and kwargs.get("device") is not None:
            source, target = args[0].device.type, torch.device(kwargs["device"]).type
            waits = not kwargs.get("non_blocking", False)
        elif func is _aten.copy_.default:
            target, source = args[0].device.type, args[1].device.type
            waits = not (len(args) > 2 and args[2])
        else:
            return
        if {source, target} == {"cpu", "cuda"}:
            what = f"{source} to {target}, {args[0].dtype}".replace("torch.", "")
            self.ledger.copied(what)
            if waits:
                self.ledger.waited(f"copy from {what}")

    def _note_kernel(self, func: Any, tensors: list[Tensor], result: Any) -> None:
        name = func.__name__.partition(".")[0]
        if name in _LAUNCHES_NOTHING or func.is_view:
            return
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.ledger.kernel(bytes_of(name, tensors, outputs))


def _kernel_of(func: Any) -> Callable[..., Any]:
    """Returns the CUDA kernel of one of our operations; fake tensors would take its stand-in."""
    return KERNELS[func.name().removeprefix("titan_moe::").partition(".")[0]]["cuda"]


def value_of(x: Tensor) -> Tensor | None:
    """Returns the values of a tensor; None if they are not known."""
    if isinstance(x, FakeTensor):
        return getattr(x, "value", None)
    return None if x.is_meta else x


def _is_whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex())


def _as_value(x: Any) -> Any:
    return value_of(x) if isinstance(x, Tensor) else x


def _as_value_if_known(x: Any) -> Any:
    value = _as_value(x)
    return x if value is None else value


def _balanced(scores: Tensor, top_k: int) -> Tensor:
    """Returns the indices of a topk that chooses all experts equally often."""
    *shape, num_experts = scores.shape
    return _balanced_rows(prod(shape), num_experts, top_k).view(*shape, top_k).clone()


@cache
def _balanced_rows(rows: int, num_experts: int, top_k: int) -> Tensor:
    return balanced_choice(num_experts, top_k)(torch.empty(rows, 0))


def _waits(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Returns whether the host must wait for the device to learn a result's size or value."""
    if func in _WAITS:
        return args[0].is_cuda
    if func in (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default):
        masks = [x for x in args[1] if x is not None and x.dtype in (torch.bool, torch.uint8)]
        return args[0].is_cuda and bool(masks)
    if func is _aten.repeat_interleave.Tensor:
        return args[0].is_cuda and kwargs.get("output_size") is None
    return False


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Runs a block on a fake GPU; scripts/rehearse.sh loads stand-ins for CUDA's libraries."""
    mode = FakeCuda()

    def tolist(x: FakeTensor) -> Any:
        """Waits once; FakeTensor's own tolist reads number by number."""
        if x.is_cuda:
            mode.ledger.waited("tolist")
        if (value := value_of(x)) is not None:
            return value.tolist()
        return np.full(x.shape, 1.0 if x.is_floating_point() else 1).tolist()

    callback = _ON_WAIT(lambda name: mode.ledger.waited(name.decode()))
    runtime = ctypes.CDLL(None)
    runtime.rehearsal_on_wait(callback)
    try:
        with mock.patch.object(FakeTensor, "tolist", tolist), mode:
            yield mode
    finally:
        runtime.rehearsal_on_wait(_ON_WAIT())
