"""Positions that a context-parallel rank holds, and each rank's share of the work."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.support.visible import visible
from titan_moe.distributed.context_parallel.apply import local_positions
from titan_moe.distributed.context_parallel.blocks import ExplicitBlocks
from titan_moe.distributed.context_parallel.recurrence import SegmentedRecurrence
from titan_moe.ops.attention import first_seen_in_sequences
from titan_moe.ops.local_attention import LocalAttention
from titan_moe.simulate.fake_rank import fake_world

KINDS_AND_SIZES = product(["window", "chunk"], [1, 4, 5, 11, 24, 99])
LOCALS = [None, *(LocalAttention(kind, size) for kind, size in KINDS_AND_SIZES)]
LAYOUTS = [(cp_size, balanced) for cp_size in (1, 2, 3, 8) for balanced in (True, False)]


@pytest.mark.parametrize(("cp_size", "balanced"), LAYOUTS)
def test_every_position_is_held_once_and_positions_ascend(cp_size: int, balanced: bool) -> None:
    parts = [local_positions(48, cp_size, rank, balanced=balanced) for rank in range(cp_size)]
    assert sorted(torch.cat(parts).tolist()) == list(range(48))
    assert all(len(part) == 48 // cp_size and (part.diff() > 0).all() for part in parts)


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("mask_documents", [True, False])
@pytest.mark.parametrize("balanced", [True, False])
def test_blocks_hold_every_visible_pair_once(
    balanced: bool, mask_documents: bool, local: LocalAttention | None
) -> None:
    documents_BS = torch.tensor([[0] * 5 + [1] * 19, [0] * 17 + [1] * 7])
    first_BS = first_seen_in_sequences(documents_BS, local, mask_documents=mask_documents)
    positions = [local_positions(24, 3, rank, balanced=balanced) for rank in range(3)]
    found = torch.zeros(2, 24, 24, dtype=torch.int64)
    for queries_S, keys_S in product(positions, positions):
        for queries, keys, mask in ExplicitBlocks().blocks(first_BS, queries_S, keys_S):
            pairs = torch.ones(1, dtype=torch.int64) if mask is None else mask[:, 0].long()
            found[:, queries_S[queries, None], keys_S[keys]] += pairs
    expected = visible(documents_BS if mask_documents else torch.zeros(2, 24), local)
    assert torch.equal(found, expected.long())


def test_a_query_without_keys_gets_nothing_and_no_nan() -> None:
    q, k, v = (torch.randn(1, 2, 3, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[0, 0, 0], [1, 0, 0], [1, 1, 1]]).bool()[None, None]
    o, lse = ExplicitBlocks().forward(q, k, v, mask, 0.5)
    assert (o[:, :, 0] == 0).all() and (lse[:, :, 0] == float("-inf")).all()
    assert torch.allclose(o[:, :, 1], v[:, :, 0], rtol=1e-14)
    scores = 0.5 * q[:, :, 2:] @ k.mT
    assert torch.allclose(lse[:, :, 2:], scores.logsumexp(-1), rtol=1e-14)


def test_recurrent_layers_under_one_mask_share_the_tensor_of_its_segments() -> None:
    noted: list[torch.Tensor] = []

    def rule(q, k, v, decay, beta, place, state, erases):  # type: ignore[no-untyped-def]
        noted.append(place)
        return v, state

    with fake_world(0, 2):
        core = SegmentedRecurrence(rule, dist.group.WORLD, balanced=True, mask_documents=True)
        mask = core.mask(torch.zeros(3, 16, dtype=torch.int32))
        x_BHSK, rates_BHS = torch.rand(3, 2, 8, 4), torch.rand(3, 2, 8)
        for _ in range(2):
            core(x_BHSK, x_BHSK, x_BHSK, mask, rates_BHS, rates_BHS)
    assert noted[0] is noted[1] and noted[0].shape == (6, 4)
