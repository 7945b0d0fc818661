"""How traces hold on to a layer's choices; tests/distributed has whole trainings."""

from itertools import product

import pytest
import torch

from titan_moe.config.pipeline import SCHEDULES, runs
from titan_moe.config.pipeline_order import pipeline_order
from titan_moe.moe.config import MoEConfig
from titan_moe.moe.layer import MoE
from titan_moe.routing.replay import _Follower, _kept

DIM = 8


def layer() -> MoE:
    torch.manual_seed(0)
    moe = MoE(DIM, MoEConfig(num_experts=4, top_k=2, hidden_dim=8), None)
    for parameter in moe.parameters():
        parameter.data.normal_()
    return moe


def test_microbatches_are_followed_one_after_the_other() -> None:
    moe = layer()
    live = moe.routing_fn
    taken: list = []
    follower = _Follower(moe)
    moe.routing_fn = _kept(moe, taken)
    follower.ahead_TK = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [0, 2]])
    x_BSD = torch.randn(1, 5, DIM)
    moe(x_BSD[:, :2])
    moe.train(False)
    moe(x_BSD)
    moe.train(True)
    moe(x_BSD[:, 2:])
    experts, weights = (torch.cat(parts) for parts in zip(*taken, strict=True))
    assert experts.tolist() == [[0, 1], [1, 2], [3, 0], [2, 3], [0, 2]]
    scores_TE = moe.router(x_BSD[0]).scores_TE
    torch.testing.assert_close(weights, moe.router.gating_weights(scores_TE, experts.long()))
    own = [set(chosen) for chosen in live(scores_TE).tolist()]
    flips = sum(len(mine - set(e)) for mine, e in zip(own, experts.tolist(), strict=True))
    assert follower.take_flips() == flips > 0
    assert moe.router.tokens_per_expert.tolist() == [3, 2, 3, 2]


def test_a_token_too_few_is_our_own_mistake() -> None:
    moe = layer()
    follower = _Follower(moe)
    follower.ahead_TK = torch.tensor([[0, 1], [1, 2], [3, 0]])
    moe(torch.randn(1, 2, DIM))
    with pytest.raises(AssertionError, match="tokens that were not routed"):
        follower.take_flips()


@pytest.mark.parametrize("name", SCHEDULES)
def test_forwards_of_every_stage_ascend(name: str) -> None:
    """Traces tell a stage's microbatches apart by their order. These orders are torch's: see
    test_pipeline.py."""
    compared = 0
    for ranks, per_rank, microbatches in product((2, 4), (1, 2), (8, 9)):
        stages = ranks * per_rank
        if (SCHEDULES[name].placement == "single") != (per_rank == 1):
            continue
        if not runs(SCHEDULES[name], microbatches, ranks=ranks, stages=stages):
            continue
        for order in pipeline_order(name, ranks, stages, microbatches):
            works = [work for slot in order for work in slot if work.kind == "F"]
            for stage in {work.stage for work in works}:
                numbers = [work.microbatch for work in works if work.stage == stage]
                assert numbers == list(range(microbatches))
        compared += 1
    assert compared > 1
