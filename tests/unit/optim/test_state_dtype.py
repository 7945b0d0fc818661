"""Moments in bfloat16: the update that float32 moments would make, rounded where they are kept."""

import copy

import pytest
import torch
from torch import nn

from titan_moe.config.job_config import Optimizer
from titan_moe.optim.optimizers import build_optimizer


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_an_update_is_that_of_the_widened_moments(implementation):
    torch.manual_seed(0)
    named = {"w": nn.Parameter(torch.randn(7, 5)), "b.bias": nn.Parameter(torch.randn(5))}
    keys = {"lr": 0.1, "implementation": implementation}
    optimizer = build_optimizer(Optimizer(**keys, state_dtype="bfloat16"), named.items())
    for _ in range(3):
        theirs = copy.deepcopy(named)
        plain = torch.optim.AdamW(theirs.values(), lr=0.1, betas=(0.9, 0.95))
        plain.param_groups[0]["weight_decay"] = 0.0
        for name, parameter in named.items():
            parameter.grad = torch.randn_like(parameter)
            theirs[name].grad = parameter.grad.clone()
            if state := optimizer.state[parameter]:
                plain.state[theirs[name]] = {
                    "step": state["step"].clone(),
                    "exp_avg": state["exp_avg"].float(),
                    "exp_avg_sq": state["exp_avg_sq"].float(),
                }
        with torch.no_grad():
            theirs["w"].mul_(1 - 0.1 * 0.1)  # The group's own decay.
        plain.step()
        optimizer.step()
        for name, parameter in named.items():
            torch.testing.assert_close(parameter, theirs[name])
            for key in ("exp_avg", "exp_avg_sq"):
                exact = plain.state[theirs[name]][key]
                kept = optimizer.state[parameter][key]
                assert kept.dtype == torch.bfloat16
                torch.testing.assert_close(kept.float(), exact, rtol=2**-8, atol=1e-8)
