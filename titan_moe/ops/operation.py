"""Registers the functions that compute each operation on the CPU and on CUDA; the type of sums."""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

KERNELS: dict[str, dict[str, Callable[..., Any]]] = {}
"""The functions that compute each operation, by its name and the type of the device."""


def operation(
    name: str, reference: Callable[..., Any], triton: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes the operation `titan_moe::NAME` from a function that returns empty results.

    The decorated function tells the results' shapes and types. Nothing is differentiated through
    it. A compiled graph, a dispatch mode and a fake tensor see torch's custom operation, which
    costs the host five times a direct call; all others call the device's kernel.

    Args:
        reference: computes the results in plain torch.
        triton: the module in titan_moe/ops whose function NAME computes them on CUDA; None: the
            reference does.
    """

    kernels = _kernels(name, reference, triton)

    def decorate(shapes: Callable[P, R]) -> Callable[P, R]:
        op = torch.library.custom_op(
            f"titan_moe::{name}",
            lambda *args: kernels[args[0].device.type](*args),
            mutates_args=(),
            schema=torch.library.infer_schema(shapes, mutates_args=()),
        )
        op.register_fake(shapes)

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            x: Any = args[0]
            if torch.compiler.is_compiling() or _is_watched(x):
                return op(*args, **kwargs)
            return kernels[x.device.type](*args, **kwargs)

        call.__doc__ = shapes.__doc__
        return call

    return decorate


def with_kernel(triton: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a Triton kernel stand in for a function of plain torch where its first argument is on
    CUDA.

    Unlike an `operation` the function may write into its arguments. A compiled graph has its plain
    torch, which the compiler fuses.

    Args:
        triton: the module in titan_moe/ops that has a function of the same name.
    """

    def decorate(reference: Callable[P, R]) -> Callable[P, R]:
        kernels = _kernels(reference.__name__, reference, triton)

        @wraps(reference)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            x: Any = args[0]
            on_cuda = x.is_cuda and not torch.compiler.is_compiling()
            return kernels["cuda" if on_cuda else "cpu"](*args, **kwargs)

        return call

    return decorate


def _kernels(
    name: str, reference: Callable[..., Any], triton: str | None
) -> dict[str, Callable[..., Any]]:
    """Registers who computes an operation. The Triton module is imported at the first call: a CPU
    run has no Triton."""

    def on_cuda(*args: Any) -> Any:
        return getattr(import_module(f"titan_moe.ops.{triton}"), name)(*args)

    KERNELS[name] = {"cpu": reference, "cuda": on_cuda if triton else reference}
    return KERNELS[name]


def at_least_float32(x: Tensor) -> torch.dtype:
    """Returns the type in which sums and exponentials of this tensor are computed."""
    return torch.promote_types(x.dtype, torch.float32)


def _is_watched(x: Any) -> bool:
    """Returns whether a dispatch mode, or x itself, handles operations on x in Python. Its values
    may be elsewhere too, on the meta device."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._dispatch_keys(x).has(torch._C.DispatchKey.Python)
        or x.is_meta
    )


def bent(x: Tensor, size: float) -> tuple[Tensor, Tensor]:
    """Returns size * tanh(x / size), and its slope; 1 - tanh^2 would lose digits."""
    twice = 2 / size * x
    return size * torch.tanh(x / size), 4 * torch.sigmoid(twice) * torch.sigmoid(-twice)
