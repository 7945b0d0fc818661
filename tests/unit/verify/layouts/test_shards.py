"""The arithmetic of shards tiles every parameter."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_moe.verify.layouts.covering import cover_options
from titan_moe.verify.layouts.layouts import Layout, depth, legal_layouts, stages
from titan_moe.verify.layouts.shards import Shards

WORLDS = [1, 2, 3, 4, 6, 8, 12, 16]
TENSOR_DIMS = {"layers.*.wq.weight": 0, "layers.*.wo.weight": 1}
_BY_WORLD = {world: cover_options(legal_layouts(world, powers_of_two=False)) for world in WORLDS}
layouts = st.sampled_from(WORLDS).flatmap(lambda world: st.sampled_from(_BY_WORLD[world]))


def coverage(shards: Shards, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Counts the ranks that hold each element."""
    held = np.zeros(shape, dtype=int)
    for rank in range(shards.layout.world_size):
        if shards.holds(rank, name):
            held[shards.box(rank, name, shape)] += 1
    return held


@given(layouts, st.integers(1, 9), st.integers(1, 9))
def test_dense_parameters_are_tiled(layout: Layout, rows: int, columns: int):
    shards = Shards(layout, TENSOR_DIMS)
    tp, stages_ = layout.tp, layout.pp
    for name, shape, copies in [
        ("layers.0.wq.weight", (rows * tp, columns), 1),
        ("layers.0.wo.weight", (rows, columns * tp), 1),
        ("layers.0.norm.weight", (rows,), tp),
    ]:
        assert (coverage(shards, name, shape) == copies * layout.dp_replicate * stages_).all()


@given(layouts, st.integers(1, 3), st.integers(1, 3), st.integers(1, 9))
def test_experts_are_tiled(layout: Layout, experts: int, hidden: int, dim: int):
    shards = Shards(layout, TENSOR_DIMS)
    shape = (experts * layout.ep, hidden * layout.etp, dim)
    for name, whole in [("w1", shape), ("w3", shape), ("w2", (shape[0], dim, shape[1]))]:
        held = coverage(shards, f"layers.0.moe.experts.{name}", whole)
        assert (held == layout.dp_replicate * layout.pp).all()


@given(layouts)
def test_each_module_is_on_one_stage(layout: Layout):
    parts = stages(layout)
    shards = Shards(layout, TENSOR_DIMS, parts)
    names = ["tok_embeddings", "norm", "output", *(f"layers.{n}" for n in range(depth(layout)))]
    for name in names:
        holders = [rank for rank in range(layout.world_size) if shards.holds(rank, f"{name}.w")]
        assert len(holders) == layout.world_size // layout.pp
        assert len({shards.coordinate(rank, "pp") for rank in holders}) == 1
    assert shards.holds(0, "tok_embeddings.weight")


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_a_v_schedule_ends_where_it_began(schedule: str, pp: int):
    layout = Layout(pp=pp, schedule=schedule)
    shards = Shards(layout, {}, stages(layout))
    assert shards.stages_of(0) == [0, 2 * pp - 1]
    assert shards.stages_of(pp - 1) == [pp - 1, pp]


@pytest.mark.parametrize(
    "shape, cut", [((8, 6), 0), ((5, 6), 0), ((2, 8), 1), ((3, 5, 16), 2), ((3, 5), 0)]
)
def test_another_dim_is_cut_where_a_rank_would_be_empty(shape: tuple[int, ...], cut: int):
    box = Shards(Layout(dp_shard=4)).box(0, "w", shape)
    sizes = [part.stop - part.start for part in box]
    assert [
        dim for dim, (size, whole) in enumerate(zip(sizes, shape, strict=True)) if size < whole
    ] == [cut]
