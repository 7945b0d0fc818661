"""Linear functions of a tensor, whose backward is their transpose and needs no activation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

LinearMap = Callable[..., Any]


def linear(
    x: Tensor, function: LinearMap, transposed: LinearMap, *saved: Tensor, **both: Any
) -> Any:
    """Returns function(x) for a linear function whose backward is transposed(gradient, *saved).
    Both functions get the further arguments `both`. If x is copied to several results,
    `transposed` gets the gradients of those that have one.

    Tensors that the backward reads belong in `saved`: recomputation frees those, and would keep
    what `transposed` holds itself.
    """
    return _Linear.apply(x, partial(function, **both), partial(transposed, **both), *saved)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, function: LinearMap, transposed: LinearMap, *saved: Tensor
    ) -> Any:
        ctx.transposed = transposed  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):  # type: ignore[no-untyped-def]
        saved = ctx.saved_tensors  # Once: a recomputation hands them out once.
        given = [grad for grad in grads if grad is not None]
        grad_x = ctx.transposed(*given, *saved) if given else None
        return grad_x, None, None, *(None for _ in saved)
