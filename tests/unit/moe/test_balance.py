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


def _scores(tokens: int, seed: int = 0) -> torch.Tensor:
    """Scores of a router that prefers some experts, [T, 16]."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(tokens, 16, generator=generator, dtype=torch.float64)
    return (logits_TE + torch.linspace(-2, 2, 16)).sigmoid()


def _margins_by_hand(scores_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int) -> torch.Tensor:
    low, high = min(bias_E.tolist()) - 1, max(bias_E.tolist()) + 1
    counts = torch.zeros(16, balance.MARGIN_BINS, dtype=torch.int64)
    for scores in scores_TE.tolist():
        biased = sorted((s + b for s, b in zip(scores, bias_E.tolist(), strict=True)), reverse=True)
        for expert, score in enumerate(scores):
            place = (biased[top_k] - score - low) / ((high - low) / balance.MARGIN_BINS)
            counts[expert, int(place)] += 1
    return counts


def test_margins_are_those_of_a_loop_over_tokens_and_experts() -> None:
    bias_E = torch.linspace(0.3, -0.4, 16)
    scores_TE, counted_T = _scores(64), torch.rand(64) < 0.5
    expected = _margins_by_hand(scores_TE, bias_E.double(), 3)
    assert torch.equal(balance.margins(scores_TE, bias_E.double(), 3), expected)
    expected = _margins_by_hand(scores_TE[counted_T], bias_E.double(), 3)
    assert torch.equal(balance.margins(scores_TE, bias_E.double(), 3, counted_T), expected)


def test_quantile_bias_is_the_exact_quantile_within_a_bin() -> None:
    scores_TE, bias_E, top_k = _scores(4000), torch.linspace(0.3, -0.4, 16).double(), 4
    counts = balance.margins(scores_TE, bias_E, top_k)
    cutoff_T1 = (scores_TE + bias_E).sort(-1, descending=True).values[:, top_k : top_k + 1]
    exact_E = (cutoff_T1 - scores_TE).sort(0).values[4000 * top_k // 16]
    found_E = balance.quantile_bias(bias_E, counts, top_k, 0.0)
    width = (bias_E.max() - bias_E.min() + 2) / balance.MARGIN_BINS
    torch.testing.assert_close(found_E, exact_E - exact_E.mean(), rtol=0, atol=2 * width.item())
    half_E = balance.quantile_bias(bias_E, counts, top_k, 0.5)
    torch.testing.assert_close(half_E, (found_E + bias_E) / 2)
    both = balance.quantile_bias(bias_E.expand(2, 16), counts.expand(2, -1, -1), top_k, 0.0)
    torch.testing.assert_close(both, found_E.expand(2, 16))


@pytest.mark.parametrize("seed", range(3))
def test_quantile_rule_is_even_in_few_steps_and_the_sign_rule_in_hundreds(seed: int) -> None:
    """Steps of one batch of tokens until the busiest expert has at most 1.1 times an even share."""

    def steps(move: str) -> int:
        bias_E, scores_TE = torch.zeros(16), _scores(4096, seed)
        for step in range(2000):
            experts_TK = (scores_TE + bias_E).topk(4, dim=-1).indices
            counts_E = experts_TK.flatten().bincount(minlength=16)
            if counts_E.max() <= 1.1 * counts_E.float().mean():
                return step
            if move == "quantile":
                counts = balance.margins(scores_TE, bias_E, 4)
                bias_E = balance.quantile_bias(bias_E, counts, 4, 0.0)
            else:
                bias_E = balance.updated_bias(bias_E, counts_E, 1e-3)
        return 2000

    assert steps("quantile") <= 8 and 150 <= steps("sign") <= 1000
