"""The arithmetic of shards tiles every parameter."""

from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from titan_moe.verify.layouts.covering import cover_options
from titan_moe.verify.layouts.layouts import Layout, legal_layouts
from titan_moe.verify.layouts.shards import Shards

WORLDS = [1, 2, 3, 4, 6, 8, 12, 16]


@cache
def of_world(world: int) -> st.SearchStrategy[Layout]:
    return st.sampled_from(cover_options(legal_layouts(world)))


layouts = st.sampled_from(WORLDS).flatmap(of_world)


def coverage(shards: Shards, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Counts the ranks that hold each element."""
    held = np.zeros(shape, dtype=int)
    for rank in range(shards.layout.world_size):
        if shards.holds(rank, name):
            held[shards.box(rank, name, shape)] += 1
    return held


@given(layouts, st.integers(1, 9), st.integers(1, 9))
def test_dense_parameters_are_tiled(layout: Layout, rows: int, columns: int):
    shards = Shards(layout)
    tp, stages_ = layout.tp, layout.pp
    for name, shape, copies in [
        ("layers.0.attention.wq.weight", (rows * tp, columns), 1),
        ("layers.0.attention.wo.weight", (rows, columns * tp), 1),
        ("layers.0.norm.weight", (rows,), tp),
    ]:
        assert (coverage(shards, name, shape) == copies * layout.dp_replicate * stages_).all()


@given(layouts, st.integers(1, 3), st.integers(1, 3), st.integers(1, 9))
def test_experts_are_tiled(layout: Layout, experts: int, hidden: int, dim: int):
    shards = Shards(layout)
    shape = (experts * layout.ep, hidden * layout.etp, dim)
    for name, whole in [("w1", shape), ("w3", shape), ("w2", (shape[0], dim, shape[1]))]:
        held = coverage(shards, f"layers.0.moe.experts.{name}", whole)
        assert (held == layout.dp_replicate * layout.pp).all()
