"""A forward and a backward that take turns."""

import threading
from typing import Any

import torch
from torch import Tensor

from titan_moe.distributed.pipeline.overlap import Alternation

LAYERS, DIM = 4, 256


class _HandOver(torch.autograd.Function):
    """Where an exchange of rows would be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alternation: Alternation, order: list[str]) -> Tensor:
        ctx.seen = alternation, order
        order.append("F")
        alternation.in_forward()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        alternation, order = ctx.seen
        order.append("B")
        alternation.in_backward()
        return grad.clone(), None, None


def forward(x: Tensor, weights: list[Tensor], alternation: Alternation, order: list[str]) -> Tensor:
    for w in weights:
        x = _HandOver.apply(torch.tanh(x @ w), alternation, order)
    return x.square().sum()


def check_a_pair(device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(0)

    def drawn() -> Tensor:
        return torch.randn(DIM, DIM, device=device, generator=generator) / 16

    weights = [drawn().requires_grad_() for _ in range(LAYERS)]
    first, second = drawn(), drawn()
    alternation, order = Alternation(device), []
    alone = torch.autograd.grad(forward(first, weights, alternation, order), weights)
    loss_alone = forward(second, weights, alternation, order).detach()

    for _ in range(3):
        loss = forward(first, weights, alternation, order)
        order.clear()
        found: dict[str, Any] = {}

        def forward_half(found: dict = found) -> None:
            found["thread"] = threading.get_ident()
            found["loss"] = forward(second, weights, alternation, order).detach()

        def backward_half(found: dict = found, loss: Tensor = loss) -> None:
            found["gradients"] = torch.autograd.grad(loss, weights)

        alternation.run(forward_half, backward_half)
        assert "".join(order) == "FB" * LAYERS
        assert found["thread"] == threading.get_ident()
        assert torch.equal(found["loss"], loss_alone)
        for ours, theirs in zip(found["gradients"], alone, strict=True):
            assert torch.equal(ours, theirs)
