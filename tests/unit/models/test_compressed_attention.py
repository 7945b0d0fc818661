"""Attention to compressed blocks, several streams and experts by token id (DeepSeek-V4)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from tests.support.packing import filled, train_packed_and_alone
from tests.support.planting import plant, right_source
from tests.support.tiers import split
from titan_moe.checks.job import check
from titan_moe.config.job_config import JobConfig
from titan_moe.models.compressed_attention import blocks_of
from titan_moe.models.hyper_connections import doubly_stochastic
from titan_moe.models.registry import flavors, model_config
from titan_moe.models.rope import Rotation
from titan_moe.models.stats import part_flops
from titan_moe.ops.attention import Sdpa
from titan_moe.verify.parity.check import cases, compare

GATE = model_config("deepseek_v4", "gate")
_PLAIN = next(case for case in cases() if case.family == "deepseek_v4")


class _Mistake(NamedTuple):
    where: str
    right: str
    wrong: str


_ATTENTION = "titan_moe.models.compressed_attention:"
_STREAMS = "titan_moe.models.hyper_connections:"
MISTAKES = {
    "output is not turned back": (
        f"{_ATTENTION}CompressedAttention.forward", "=-rotation.sin_BSC", "=rotation.sin_BSC"
    ),
    "queries are not normed": (
        f"{_ATTENTION}CompressedAttention.forward",
        "F.rms_norm(q_BSHC, (channels,), None, self.eps)", "q_BSHC",
    ),
    "first channels turn": (f"{_ATTENTION}turned", '"neighbours", first)', '"neighbours", 0)'),
    "last token does not see its block": (
        f"{_ATTENTION}blocks_of", "last_BJ[:, None] <= numbers_S", "last_BJ[:, None] < numbers_S"
    ),
    "key stands at its last token": (f"{_ATTENTION}blocks_of", "[..., -ratio]", "[..., -1]"),
    "series of overlaps are swapped": (
        f"{_ATTENTION}Compressor.forward", "zip(self._cut(x_BSE),", "zip(self._cut(x_BSE)[::-1],"
    ),
    "weights over channels": (f"{_ATTENTION}Compressor.forward", "softmax(2)", "softmax(3)"),
    "streams mixed the other way": (f"{_STREAMS}HyperConnection.forward", ".mT @", " @"),
    "rows first": (f"{_STREAMS}doubly_stochastic", "range(steps - 1)", "range(steps)"),
    "score without a root": ("titan_moe.moe.router:_sqrt_softplus", ".sqrt()", ""),
}  # fmt: skip


@pytest.fixture
def mistake(request: pytest.FixtureRequest) -> Iterator[None]:
    bug = _Mistake(*MISTAKES[request.param])
    function, _ = right_source(bug)
    code = function.__code__
    plant(bug)
    yield
    function.__code__ = code


@pytest.mark.parametrize("mistake", split(MISTAKES, ["rows first"]), indirect=True)
def test_parity_sees_mistake_in_deepseek_v4(mistake: None):
    case = replace(_PLAIN, settings={**_PLAIN.settings, "hc_sinkhorn_iters": 2})
    assert compare(case, 0, torch.float64).worst > 1e-6


def test_packed_documents_are_trained_as_one_by_one():
    packed, alone = (filled(GATE, Sdpa(mask_documents=masked)) for masked in (True, False))
    train_packed_and_alone(packed.eval(), alone.eval(), (1, 2, 17, 70, 6, 8, 4))


@pytest.mark.parametrize("overlaps", [False, True])
def test_blocks_are_those_of_each_document(overlaps: bool):
    lengths, ratio = [3, 9, 4, 1, 6], 4
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    angles = torch.arange(places.shape[1], dtype=torch.float64)[None, :, None]
    blocks = blocks_of(Rotation(angles, -angles, places), ratio, overlaps=overlaps)
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    wanted = [
        (start, start + first, start + length)
        for start, length in zip(starts, lengths, strict=True)
        for first in range(0, length - ratio + 1, ratio)
    ]
    assert len(wanted) == 4 < blocks.tokens_BJW.shape[1] == sum(lengths) // ratio
    for j, (start, first, end) in enumerate(wanted):
        tokens = range(first - ratio * overlaps, first + ratio)
        inside = [t for t, is_in in zip(tokens, blocks.inside_BJW[0, j], strict=True) if is_in]
        assert inside == [t for t in tokens if t >= start]
        assert blocks.tokens_BJW[0, j, -ratio:].tolist() == [*tokens][-ratio:]
        assert blocks.rotation.cos_BSC[0, j] == -blocks.rotation.sin_BSC[0, j] == first
        seen = blocks.seen_BSJ[0, :, j].nonzero()[:, 0].tolist()
        assert seen == [*range(first + ratio - 1, end)]
    assert not blocks.seen_BSJ[..., len(wanted) :].any()


def test_mixing_matrices_are_doubly_stochastic_and_columns_come_last():
    logits = torch.randn(
        2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    mix = doubly_stochastic(logits, 20, 1e-6)
    for dim in (-1, -2):
        assert (mix.sum(dim) - 1).abs().max() < 1e-3
    one, eps = doubly_stochastic(5 * logits, 1, 1e-6), 1e-6
    rows = (5 * logits).softmax(-1) + eps
    assert torch.equal(one, rows / (rows.sum(-2, keepdim=True) + eps))


@pytest.mark.parametrize(
    ("axis", "says"), [("tensor", "must divide num_kv_heads=1"), ("context", "compresses blocks")]
)
def test_cut_sequences_and_heads_are_refused_in_one_line(axis: str, says: str):
    job = JobConfig.model_validate(
        {
            "model": {"name": "deepseek_v4", "flavor": "gate"},
            "parallelism": {f"{axis}_parallel_degree": 2},
            "training": {"seq_len": 64},
        }
    )
    (line,) = check(job, GATE, 2)
    assert line.startswith(f"parallelism.{axis}_parallel_degree=2") and says in line


def test_selection_costs_fewer_flops_than_all_blocks():
    flash = flavors("deepseek_v4")["Flash"]
    sparse = replace(flash.sparse, indexer=replace(flash.sparse.indexer, top_k=10**6))
    few, all_ = (part_flops(each, 65536) for each in (flash, replace(flash, sparse=sparse)))
    assert few["layers.2"] < all_["layers.2"] and few["layers.3"] == all_["layers.3"]
