"""The process groups of a rank, by hand."""

from titan_moe.verify.layouts.groups import groups, members
from titan_moe.verify.layouts.layouts import Layout, legal_layouts


def test_members_and_groups_by_hand():
    layout = Layout(dp_replicate=2, cp=2, tp=2, ep=2)
    assert members(layout, 5, "tp") == (4, 5)
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


def test_groups_leave_the_world_to_parameters():
    assert groups(Layout(dp_shard=8), 3) == set()
    assert groups(Layout(dp_shard=8, ep=8), 3) == {("tokens", tuple(range(8)))}


def test_groups_between_nodes():
    layout = Layout(dp_shard=4, tp=2, ep=4, etp=2, dispatch="nodes")
    assert {("tokens", (1, 3)), ("tokens", (1, 5))} <= groups(layout, 1)
    assert groups(layout, 7) >= {("tokens", (5, 7)), ("tokens", (3, 7))}


def test_groups_are_as_many_on_every_rank():
    for layout in legal_layouts(16):
        counts = {len(groups(layout, rank)) for rank in range(16)}
        assert len(counts) == 1 and max(counts) <= 11
