"""The arithmetic that layouts are checked by, and that it finds what is wrong."""

from dataclasses import replace

import pytest

from titan_moe.simulate.models import layout_models
from titan_moe.simulate.tiling import (
    MOST_GROUPS,
    Tiling,
    group_problems,
    groups,
    has_empty_shards,
    members,
    tiling_problem,
)
from titan_moe.verify.layouts import shards as shards_module
from titan_moe.verify.layouts.layouts import Layout, legal_layouts
from titan_moe.verify.layouts.shards import Shards

LAYOUT = Layout(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4, etp=2)
DIMS = {"layers.*.wq.weight": 0, "layers.*.wo.weight": 1}
SHAPES = {
    "layers.0.wq.weight": (6, 5),
    "layers.1.wo.weight": (5, 6),
    "layers.1.norm.weight": (7,),
    "layers.1.moe.experts.w2": (4, 3, 10),
}
STAGES = [["layers.0"], ["layers.1"]]


def box(*parts: tuple[int, int]) -> tuple[slice, ...]:
    return tuple(slice(*part) for part in parts)


def judge(boxes: list, *, copies: int = 1, may_be_empty: bool = False) -> str:
    return tiling_problem((4, 2), boxes, copies=copies, may_be_empty=may_be_empty)


def test_a_tiling_is_one():
    halves = [box((0, 2), (0, 2)), box((2, 4), (0, 2))]
    assert judge(halves) == ""
    assert judge(halves * 3, copies=3) == ""
    assert judge([*halves, box((4, 4), (0, 2))], may_be_empty=True) == ""


@pytest.mark.parametrize(
    "boxes, problem",
    [
        ([((0, 2), (0, 2))], "parts hold 4 of 8 elements"),
        ([((0, 3), (0, 2)), ((2, 4), (0, 2))], "1 pairs of parts overlap"),
        ([((0, 4), (0, 1)), ((1, 5), (1, 2))], "parts reach beyond it"),
        ([((0, 4), (0, 2)), ((4, 4), (0, 2))], "1 ranks hold nothing"),
        (2 * [((0, 2), (0, 2))] + [((2, 4), (0, 2))], "parts are held [1, 2] times, not 1"),
    ],
)
def test_no_tiling_is_refused(boxes: list, problem: str):
    assert judge([box(*parts) for parts in boxes]) == problem


@pytest.mark.parametrize(
    "part, pieces, empty",
    [
        ((8, 3), 4, False),
        ((7, 3), 4, False),
        ((5, 3), 4, True),
        ((5, 8), 4, False),
        ((3,), 4, True),
    ],
)
def test_empty_shards_where_no_dim_divides(part: tuple[int, ...], pieces: int, empty: bool):
    assert has_empty_shards(part, pieces) is empty


def test_shards_pass():
    assert Tiling().problems(Shards(LAYOUT, DIMS, STAGES), SHAPES) == []


def test_experts_by_the_wrong_axis_are_seen(monkeypatch: pytest.MonkeyPatch):
    right = Shards.coordinate
    other = {"ep": "cp"}
    monkeypatch.setattr(
        Shards, "coordinate", lambda self, rank, axis: right(self, rank, other.get(axis, axis))
    )
    (problem,) = Tiling().problems(Shards(LAYOUT, DIMS, STAGES), SHAPES)
    assert problem.startswith("layers.1.moe.experts.w2 [4, 3, 10]: parts ")


def test_another_cut_of_tp_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards_module, "_even", lambda part, pieces, piece: (part[0], part[0] + 1))
    problems = Tiling().problems(Shards(LAYOUT, DIMS, STAGES), SHAPES)
    assert {problem.split()[0] for problem in problems} == set(SHAPES) - {"layers.1.norm.weight"}


def test_a_layer_on_two_stages_is_seen():
    shards = Shards(LAYOUT, DIMS, [["layers.0", "layers.1"], ["layers.1"]])
    assert "layers.1.norm.weight is on the stages [0, 1], not on one" in Tiling().problems(
        shards, SHAPES
    )


def test_a_stage_on_other_ranks_is_seen():
    two_each = replace(LAYOUT, schedule="ZBVZeroBubble")
    problems = Tiling().problems(Shards(two_each, DIMS, [*STAGES, ["layers.2"]]), SHAPES)
    assert problems == []
    monkey = Shards(LAYOUT, DIMS, STAGES)
    object.__setattr__(monkey, "stages_of", lambda rank: [0] if rank < 17 else [1])
    assert "stage 0 is on 17 ranks, not on 16" in Tiling().problems(monkey, SHAPES)


def test_members_by_hand():
    layout = Layout(dp_replicate=2, cp=2, tp=2, ep=2)
    assert members(layout, 5, "tp") == (4, 5)
    assert members(layout, 5, "cp") == (5, 7)
    assert members(layout, 5, "sequence") == (4, 5, 6, 7)
    assert members(layout, 5, "dp_replicate") == (1, 5)
    assert members(layout, 5, "edp") == (5, 7)
    assert groups(layout, 5) == {
        ("tokens", (4, 5)),
        ("tokens", (5, 7)),
        ("tokens", (4, 5, 6, 7)),
        ("parameters", (1, 5)),
        ("parameters", (5, 7)),
    }


def test_the_world_needs_no_group_for_parameters():
    assert groups(Layout(dp_shard=8), 3) == set()
    assert groups(Layout(dp_shard=8, ep=8), 3) == {("tokens", tuple(range(8)))}


def test_rows_between_nodes_have_groups_of_their_own():
    layout = Layout(dp_shard=4, tp=2, ep=4, etp=2, dispatch="nodes")
    assert {("tokens", (1, 3)), ("tokens", (1, 5))} <= groups(layout, 1)
    assert groups(layout, 7) >= {("tokens", (5, 7)), ("tokens", (3, 7))}


def test_groups_do_not_grow_with_the_world():
    for layout in legal_layouts(16):
        assert group_problems(layout) == []
        assert len(groups(layout, 7)) <= MOST_GROUPS == 11


def test_shapes_of_deep_models_are_those_of_their_kinds():
    layout = Layout(pp=4, tp=4, ep=4, schedule="DualPipeV")
    for family, model in layout_models(layout).items():
        shapes = model.shapes()
        assert model.config.num_layers == 8 == len(model.stages)
        assert {name.split(".")[1] for name in shapes if name.startswith("layers")} == set(
            map(str, range(8))
        )
        dense = "layers.0.feed_forward.w1.weight" in shapes
        assert dense == (family == "deepseek_v3")
        assert shapes["layers.7.moe.experts.w1"][0] == (256 if dense else 12)
