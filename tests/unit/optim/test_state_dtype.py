"""Moments in bfloat16: half the memory, and an update that float32 moments would nearly make."""

import copy

import pytest
import torch
from torch import nn

from titan_moe.config.job_config import Optimizer
from titan_moe.optim.optimizers import build_optimizer


def state_bytes(optimizer):
    moments = [
        tensor
        for state in optimizer.state.values()
        for key, tensor in state.items()
        if key != "step"
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in moments)


def train(steps=150, **keys):
    """Losses of a small regression, and the optimizer."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 8)])})
    first, second = model["layers"]
    teacher = torch.randn(16, 8)
    optimizer = build_optimizer(Optimizer(lr=1e-2, **keys), model.named_parameters())
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 16)
        loss = (second(first(x).relu()) - x @ teacher).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), optimizer


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_half_the_memory_and_nearly_the_same_curve(name):
    wide, narrow = (train(name=name, state_dtype=d) for d in ("float32", "bfloat16"))
    assert state_bytes(wide[1]) == 2 * state_bytes(narrow[1]) > 0
    relative = (narrow[0] - wide[0]).abs() / wide[0]
    assert 0 < relative.max() < 0.05 and relative.mean() < 0.01
    assert narrow[0][-1] < narrow[0][0] / 2, narrow[0][-1]


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
