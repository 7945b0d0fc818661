"""The router's product of bfloat16 values, against float64."""

from copy import deepcopy

import torch

from titan_moe.moe.config import MoEConfig
from titan_moe.moe.router import Router


def router_errors(device: str) -> tuple[list[float], list[float]]:
    """Returns relative errors of the logits, and of the gradients of tokens, gate and bias."""
    torch.manual_seed(0)
    config = MoEConfig(num_experts=128, top_k=8, hidden_dim=8, router_bias=True)
    router = Router(512, config).to(device, torch.bfloat16)
    x_TD = torch.randn(256, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    upstream_TE = torch.randn(256, 128, device=device)
    logits, grads = [], []
    exact = deepcopy(router).double(), x_TD.detach().double().requires_grad_()
    for model, x in ((router, x_TD), exact):
        leaves = x, model.gate.weight, model.gate.bias
        logits_TE = model(x).logits_TE
        logits_TE.backward(upstream_TE.to(logits_TE))
        logits.append(logits_TE.detach())
        grads.append([leaf.grad.clone() for leaf in leaves])
    return [_error(*logits)], [_error(*pair) for pair in zip(*grads, strict=True)]


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())
