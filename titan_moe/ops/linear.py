"""Linear functions of a tensor, whose backward is their transpose and needs no activation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

LinearMap = Callable[..., Tensor]


def linear(x: Tensor, function: LinearMap, transposed: LinearMap, **both: Any) -> Tensor:
    """Returns function(x) for a linear function whose backward is `transposed`. Both get the
    further arguments `both`."""
    return _Linear.apply(x, partial(function, **both), partial(transposed, **both))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, function: LinearMap, transposed: LinearMap) -> Tensor:
        ctx.transposed = transposed  # type: ignore[attr-defined]
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[override, no-untyped-def]
        return ctx.transposed(grad), None, None
