"""Layouts: all of a world, their text, and options that rotate over them."""

import pytest

from tests.support.refusals import refusal
from titan_moe.verify.layouts.covering import cover_options
from titan_moe.verify.layouts.layouts import (
    AXES,
    OPTIONS,
    SEQ_LEN,
    SPLIT_BACKWARD,
    depth,
    layout_tables,
    legal_layouts,
    num_sequences,
    parse,
    stages,
)


@pytest.mark.parametrize(
    "world_size, count", [(1, 1), (2, 11), (4, 57), (8, 203), (16, 574), (32, 1386), (64, 2982)]
)
def test_every_legal_layout_is_listed_once(world_size: int, count: int):
    layouts = legal_layouts(world_size)
    assert len(layouts) == len(set(layouts)) == count
    for layout in layouts:
        assert layout.world_size == world_size
        block = layout.dp_shard * layout.cp * layout.tp
        assert layout.edp * layout.ep * layout.etp == block


def test_covered_layouts_are_read_back_as_written_and_split_backwards_recompute_nothing():
    for layout in cover_options(legal_layouts(8)):
        assert parse(str(layout)) == layout
        assert layout.pp == 1 or layout.schedule not in SPLIT_BACKWARD or layout.recompute == "none"


@pytest.mark.parametrize(
    "text, words",
    [
        ("dp=2", "'dp' is unknown"),
        ("tp=two", "tp=two must be a positive number"),
        ("tp=0", "tp=0 must be a positive number"),
        ("schedule=Fast", "choose 1F1B"),
        ("dp_shard=2,ep=4", "ep 4 x etp 1 must divide dp_shard 2 x cp 1 x tp 1 = 2"),
    ],
)
def test_text_that_is_no_layout_gets_one_line(text: str, words: str):
    assert words in refusal(parse, text)


def test_each_value_meets_each_axis():
    layouts = cover_options(legal_layouts(8))
    for option, values in OPTIONS.items():
        # A pipeline's schedule accumulates by a rule of its own.
        axes = [axis for axis in AXES if (option, axis) != ("accumulation", "pp")]
        for value in values:
            for axis in axes:
                assert any(
                    layout.size(axis) > 1
                    and layout.has(option)
                    and getattr(layout, option) == value
                    for layout in layouts
                ), f"{option}={value} never meets {axis}"


def test_fixed_options_stay_and_refused_values_are_passed_over():
    layouts = cover_options(
        legal_layouts(4),
        fixed={"recompute": "full"},
        legal=lambda layout: layout.cp_method != "ring",
    )
    assert {layout.recompute for layout in layouts} == {"full"}
    assert {layout.cp_method for layout in layouts if layout.cp > 1} == {"allgather", "ulysses"}
    assert not {layout.schedule for layout in layouts if layout.pp > 1} & set(SPLIT_BACKWARD)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_every_layout_gets_microbatches_and_layers_that_fit(world_size: int):
    for layout in cover_options(legal_layouts(world_size)):
        training = layout_tables(layout)["training"]
        own, local = num_sequences(layout) // layout.data_ranks, training["local_batch_size"]
        size = layout_tables(layout)["parallelism"]["pipeline_parallel_microbatch_size"]
        assert num_sequences(layout) % layout.data_ranks == own % local == local % size == 0
        assert own // size >= 2
        assert SEQ_LEN % (2 * layout.cp) == SEQ_LEN % (layout.cp * layout.tp) == 0
        names = [name for stage in stages(layout) for name in stage]
        layers = [f"layers.{layer}" for layer in range(depth(layout))]
        assert names in ([], ["tok_embeddings", *layers, "norm", "output"])
        assert len(stages(layout)) in (0, layout.num_stages)
