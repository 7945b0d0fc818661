"""The bias update, losses that are attached, counts; tests of the layer have the formulas."""

from dataclasses import replace

import pytest
import torch

from titan_moe.models.registry import model_config
from titan_moe.moe import balance
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.layer import MoE
from titan_moe.parallelize import parallelize


@pytest.mark.parametrize("rows", [0, 2**25, 2**45])
def test_bias_moves_towards_the_mean_by_the_speed(rows: int):
    bias = balance.updated_bias(torch.zeros(4), torch.tensor([1, 5, 3, 3]) + rows, 0.1)
    torch.testing.assert_close(bias, torch.tensor([0.1, -0.1, 0.0, 0.0]))


def test_attached_loss_gets_gradient_one_and_is_counted_once_in_the_backward():
    x = torch.randn(3, requires_grad=True)
    parameter = torch.tensor(2.0, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    out = balance.attach_loss(x, parameter**2, total)
    assert torch.equal(out, x)
    assert total == 0
    (out * 5).sum().backward()
    assert parameter.grad == 4.0
    assert torch.equal(x.grad, torch.full((3,), 5.0))
    assert total == 4.0


@pytest.mark.parametrize("num_experts", [5, 40_000])  # The latter are not numbered by 16 bits.
def test_counts_per_sequence_with_experts_nobody_chose(num_experts: int):
    last = num_experts - 1
    experts_BN = torch.tensor([[0, last, last, last], [2, 2, 0, last - 1]])
    counts_BE = balance.counts_per_sequence(experts_BN, num_experts)
    assert counts_BE[:, [0, 2, last - 1, last]].tolist() == [[1, 0, 0, 3], [1, 2, 1, 0]]
    assert counts_BE.sum() == 8


@pytest.mark.parametrize(
    ("given", "warns"),
    [
        ({}, True),
        ({"z_loss_weight": 0.1}, True),
        ({"bias_update_speed": 0.1}, False),
        ({"global_aux_loss_weight": 0.1}, False),
        ({"sequence_aux_loss_weight": 0.1}, False),
    ],
)
def test_experts_that_nothing_balances_get_one_line(given, warns, caplog, monkeypatch):
    monkeypatch.setattr(parallelize.dist, "get_rank", lambda: 0)
    moe = MoEConfig(num_experts=4, top_k=1, hidden_dim=4, **given)
    config, layer = replace(model_config("qwen3", "gate"), moe=moe), MoE(4, moe, None)
    parallelize.warn_of_unbalanced_experts(config, [layer.requires_grad_(False)])
    assert not caplog.messages, "routers that are frozen need no balance"
    parallelize.warn_of_unbalanced_experts(config, [layer.requires_grad_(True)])
    assert [m.startswith("nothing balances") for m in caplog.messages] == [True] * warns
