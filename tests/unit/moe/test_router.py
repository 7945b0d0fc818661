"""Scores and choices against loops over tokens; tests of the layer have the weights."""

from dataclasses import replace

import pytest
import torch

from tests.support.router_cases import router_errors
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.router import Router
from titan_moe.ops.permute_indices import reached_ranks

CONFIG = MoEConfig(num_experts=8, top_k=3, hidden_dim=4)


def _router(config: MoEConfig) -> Router:
    torch.manual_seed(0)
    router = Router(16, config)
    router.gate.weight.data.normal_()
    return router


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_scores_are_float32_at_least_and_shares_sum_to_one(score: str):
    scores = _router(replace(CONFIG, score=score)).bfloat16()(torch.randn(5, 16).bfloat16())
    assert scores.scores_TE.dtype == torch.float32
    torch.testing.assert_close(scores.shares_TE.sum(-1), torch.ones(5))
    expected = getattr(torch, score)(scores.logits_TE, *([-1] if score == "softmax" else []))
    assert torch.equal(scores.scores_TE, expected)


@pytest.mark.parametrize("group_score_top", [1, 2])
def test_group_limited_choice_matches_a_loop(group_score_top: int):
    config = replace(CONFIG, num_groups=4, top_groups=2, group_score_top=group_score_top)
    router = _router(config)
    router.expert_bias.normal_()
    scores_TE = torch.rand(50, 8)
    experts_TK = router.select(scores_TE, router.expert_bias)
    for scores, experts in zip(scores_TE + router.expert_bias, experts_TK, strict=True):
        groups = scores.view(4, 2)
        worth = [sum(sorted(group.tolist())[-group_score_top:]) for group in groups]
        best = sorted(range(4), key=lambda g: -worth[g])[:2]
        eligible = [e for e in range(8) if e // 2 in best]
        expected = sorted(eligible, key=lambda e: -scores[e])[:3]
        assert experts.tolist() == expected


def test_product_on_tensor_cores_rounds_the_gradient_of_logits_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, mm = router_errors("cpu"), torch.mm

    def wide_mm(x, w, out_dtype):  # CUDA's, which adds exact products up.
        return mm(x.to(out_dtype), w.to(out_dtype))

    monkeypatch.setattr(torch, "mm", wide_mm)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    logits, *grads = router_errors("cpu")
    assert max(plain[0], logits) < 1e-6
    assert max(plain) < max(grads) < 1.5 * max(plain)


def test_forced_balance_is_seen_in_a_printed_router():
    router = _router(replace(CONFIG, force_load_balance=True))
    assert "GivenExperts(each in turn)" in repr(router)
    experts_TK = router.select(torch.rand(16, 8), router.expert_bias)
    assert experts_TK.flatten().bincount().tolist() == [6] * 8


@pytest.mark.parametrize(
    ("num_experts", "top_k", "ranks", "random"),
    [(128, 8, 8, 5.25), (256, 8, 8, 5.25), (64, 6, 4, 3.3)],
)
def test_forced_balance_spreads_a_token_over_as_many_ranks_as_chance(
    num_experts: int, top_k: int, ranks: int, random: float
):
    config = replace(CONFIG, num_experts=num_experts, top_k=top_k, force_load_balance=True)
    scores_TE = torch.rand(num_experts, num_experts)
    experts_TK = _router(config).select(scores_TE, torch.zeros(num_experts))
    assert experts_TK.flatten().bincount().tolist() == [top_k] * num_experts
    assert all(len(set(experts)) == top_k for experts in experts_TK.tolist())
    reached_TP = reached_ranks(experts_TK, num_experts // ranks, ranks)
    assert reached_TP.sum(1).double().mean() == pytest.approx(random, rel=0.15)
