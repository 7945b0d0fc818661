"""Operations around a recurrence that keep their arguments alone for the backward, which computes
them again: the short convolution before it, and the gated norm after it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from titan_moe.ops.operation import at_least_float32


class Recomputed(torch.autograd.Function):
    """Keeps a function's arguments, and computes it again in the backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, function: Callable[..., Any], *args: Tensor | None) -> Any:
        ctx.function = function  # type: ignore[attr-defined]
        ctx.save_for_backward(*args)  # type: ignore[arg-type]
        return function(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # type: ignore[override, no-untyped-def]
        args = [None if x is None else x.detach() for x in ctx.saved_tensors]
        needed = zip(args, ctx.needs_input_grad[1:], strict=True)
        wanted = [x for x, needs in needed if needs and x is not None]
        with torch.enable_grad():
            for x in wanted:
                x.requires_grad_()
            outputs = ctx.function(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        found = iter(torch.autograd.grad(outputs, wanted, grads))
        return None, *(next(found) if needs else None for needs in ctx.needs_input_grad[1:])


def short_convolution(
    x_BSC: Tensor,
    weight_C1W: Tensor,
    place_BS: Tensor,
    before_BNC: Tensor | None = None,
    bias_C: Tensor | None = None,
) -> Tensor:
    """Returns silu of each channel's weighted sum over a token and the W - 1 before it in its
    document, and its bias.

    Keeps its arguments alone for the backward. Sums are in at least float32.

    Args:
        weight_C1W: the last is the token's own.
        before_BNC: the W - 1 tokens before each sequence, which tokens of the same document see;
            None: zeros.
    """
    if torch.compiler.is_compiling():
        return _convolved(x_BSC, weight_C1W, place_BS, before_BNC, bias_C)
    return Recomputed.apply(_convolved, x_BSC, weight_C1W, place_BS, before_BNC, bias_C)


def _convolved(
    x_BSC: Tensor,
    weight_C1W: Tensor,
    place_BS: Tensor,
    before_BNC: Tensor | None,
    bias_C: Tensor | None,
) -> Tensor:
    wide, length, width = at_least_float32(x_BSC), x_BSC.shape[1], weight_C1W.shape[-1]
    if before_BNC is None:
        before_BNC = x_BSC.new_zeros(len(x_BSC), width - 1, x_BSC.shape[2])
    x, weight = torch.cat([before_BNC, x_BSC], 1).to(wide), weight_C1W.to(wide)
    y = x[:, width - 1 :] * weight[:, 0, -1]
    if bias_C is not None:
        y = y + bias_C.to(wide)
    for back in range(1, width):
        begins = width - 1 - back
        unseen = (place_BS < back)[..., None]
        y = y + (x[:, begins : begins + length] * weight[:, 0, begins]).masked_fill(unseen, 0)
    return F.silu(y).to(x_BSC.dtype)


def gated_norm(
    o_BSHV: Tensor,
    v_BSHV: Tensor,
    d_H: Tensor,
    z_BSD: Tensor,
    scale_D: Tensor,
    size: int,
    eps: float,
) -> Tensor:
    """Returns scale * norm((o + d v) * silu(z)) of each `size` channels, in the type of z, as
    Mamba-2 has it (arXiv 2405.21060, section 7).

    Keeps its arguments alone for the backward. Computes in at least float32.
    """
    function, tensors = partial(_gated_norm, size, eps), (o_BSHV, v_BSHV, d_H, z_BSD, scale_D)
    if torch.compiler.is_compiling():
        return function(*tensors)
    return Recomputed.apply(function, *tensors)


def _gated_norm(  # type: ignore[no-untyped-def]
    size: int, eps: float, o_BSHV, v_BSHV, d_H, z_BSD, scale_D
) -> Tensor:
    wide = at_least_float32(z_BSD)
    o, v, d, z, scale = (x.to(wide) for x in (o_BSHV, v_BSHV, d_H, z_BSD, scale_D))
    gated = (o + v * d[:, None]).flatten(2) * F.silu(z)
    normed = F.rms_norm(gated.unflatten(-1, (-1, size)), (size,), None, eps).flatten(-2)
    return (normed * scale).to(z_BSD.dtype)
