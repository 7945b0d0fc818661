"""Trainer.reshard: the bits of a run that was saved, stopped and resumed in the other layout."""

from pathlib import Path

import pytest

from tests.support.gates import OTHERS, SAMPLE
from tests.support.resharding import LEG, go_on, run_and_reshard, unlike
from tests.support.tiers import tiered
from titan_moe.models.registry import FAMILIES
from titan_moe.verify.layouts.layouts import depth, parse

_V3, _QWEN = "deepseek_v3", "qwen3"

SHORT = [
    (_V3, "dp_shard=2", "tp=2"),
    (_QWEN, "pp=2,schedule=1F1B", "dp_shard=2,ep=2"),
    (_V3, "dp_shard=4,etp=4", "dp_shard=2,cp=2"),
    (_V3, "dp_replicate=2,dp_shard=2", "cp=2,tp=2,etp=4,cp_method=ulysses"),
    (_V3, "pp=4,schedule=1F1B", "tp=2,dp_shard=2,ep=2,etp=2"),
]
LONG = [
    (_V3, "dp_shard=2,cp=2,tp=2,ep=8", "dp_replicate=2,dp_shard=4"),
    (_V3, "dp_shard=8", "dp_shard=8,ep=8"),
    (_V3, "pp=4,dp_shard=2,ep=2,schedule=1F1B", "dp_shard=4,tp=2"),
    (_V3, "pp=4,schedule=ZBVZeroBubble", "pp=4,schedule=Interleaved1F1B"),
    (_V3, "pp=4,schedule=DualPipeV", "tp=4,etp=4"),
    (_V3, "pp=2,tp=2,dp_replicate=2,schedule=LoopedBFS", "cp=8,etp=2"),
    (_QWEN, "dp_shard=8,ep=8", "pp=4,tp=2,schedule=LoopedBFS"),
    (_QWEN, "dp_shard=3,cp=2,etp=2", "dp_shard=3,tp=2,ep=2"),
]


def _next_of_size(place: int) -> str:
    """In the gate's sample the next layout of as many ranks."""
    ranks = parse(SAMPLE[place]).world_size
    others = [*SAMPLE[place + 1 :], *SAMPLE[:place]]
    return next(each for each in others if parse(each).world_size == ranks)


SAMPLED = [(before, _next_of_size(place)) for place, before in enumerate(SAMPLE)]


def check(tmp_path: Path, family: str, before: str, after: str) -> list[str]:
    layouts = parse(before), parse(after)
    num_layers = max(map(depth, layouts))
    live = run_and_reshard(family, layouts, tmp_path / "live", depth=num_layers)
    resumed = tmp_path / "resumed"
    ours = go_on(family, live, LEG, layouts[1], resumed, depth=num_layers, save_last=True)
    return unlike(live, ours)


@pytest.mark.parametrize("family, before, after", tiered(SHORT[:2], slow=SHORT[2:], full=LONG))
def test_a_run_goes_on_in_another_layout(
    tmp_path: Path, family: str, before: str, after: str
) -> None:
    assert check(tmp_path, family, before, after) == []


@pytest.mark.parametrize(
    "family, before, after",
    tiered(
        [],
        slow=[(family, "tp=2,dp_shard=2,ep=2,etp=2", "pp=2,cp=2,ep=2") for family in OTHERS],
        full=[(family, *pair) for family in FAMILIES for pair in SAMPLED],
    ),
)
def test_every_family_goes_on_in_another_layout(
    tmp_path: Path, family: str, before: str, after: str
) -> None:
    assert check(tmp_path, family, before, after) == []
