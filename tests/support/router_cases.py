"""The router's product of bfloat16 values, against float64."""

from copy import deepcopy

import torch

from titan_moe.moe.config import MoEConfig
from titan_moe.moe.router import Router


def router_errors(device: str) -> list[float]:
    """Returns relative errors of the logits, and of the gradients of tokens, gate and bias."""
    torch.manual_seed(0)
    config = MoEConfig(num_experts=128, top_k=8, hidden_dim=8, router_bias=True)
    router = Router(512, config).to(device, torch.bfloat16)
    x_TD = torch.randn(256, 512, device=device).bfloat16().requires_grad_()
    upstream_TE, values = torch.randn(256, 128, device=device), []
    for model in (router, deepcopy(router).double()):
        leaves = x_TD.to(model.gate.weight), *model.gate.parameters()
        logits_TE = model(leaves[0]).logits_TE
        grads = torch.autograd.grad(logits_TE, leaves, upstream_TE.to(logits_TE))
        values.append([logits_TE.detach(), *grads])
    return [
        float((found - exact).norm() / exact.norm()) for found, exact in zip(*values, strict=True)
    ]
