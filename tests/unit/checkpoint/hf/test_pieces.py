"""Boxes of our tensors in Hugging Face tensors, against whole tensors taken apart slowly."""

import itertools
import random
from math import prod

import numpy as np
import pytest

from titan_moe.checkpoint.hf.pieces import Stored, cut, whole
from titan_moe.distributed.boxes import inside, sizes
from titan_moe.models.hf_names import HFWeight, Rows

EXPERTS, ROWS, COLUMNS = 3, 4, 6
KINDS = ("whole", "first half", "second half", "even", "odd")
CASES = [
    (name, shape, HFWeight(theirs, transposed=transposed, rows=rows))
    for name, shape, theirs in (
        ("layers.1.feed_forward.w1.weight", (ROWS, COLUMNS), "w"),
        ("layers.1.moe.experts.w1", (EXPERTS, ROWS, COLUMNS), "w"),
        ("layers.1.moe.experts.w1", (EXPERTS, ROWS, COLUMNS), "w.{expert}"),
        ("layers.1.moe.experts.b1", (EXPERTS, ROWS), "b"),
        ("layers.1.moe.experts.b1", (EXPERTS, ROWS), "b.{expert}"),
        ("layers.1.attention.wq.bias", (ROWS,), "b"),
    )
    for rows in KINDS
    for transposed in (False, True)
    if not transposed or len(shape) - ("{expert}" in theirs) - (theirs[0] == "b") >= 2
]
CASES += [
    ("layers.1.attention.in_proj.q.weight", (ROWS, *inner), HFWeight("w", rows=Rows(*rows)))
    for rows in ((0, 2, 5), (3, 5, 5), (1, 2, 3), (2, 6, 7))
    for inner in ((COLUMNS,), (1, 3))
]


def _slow(theirs, name, way):
    """Returns our whole tensor, or one expert's part of it, from the whole stored tensor."""
    if isinstance(rows := way.rows, Rows):
        mine = [row for row in range(len(theirs)) if rows.first <= row % rows.size < rows.last]
        return theirs[mine]
    if way.transposed:
        theirs = np.swapaxes(theirs, -1, -2)
    is_bias = theirs.ndim - (".experts." in name and "{expert}" not in way.name) == 1
    axis = theirs.ndim - 1 if is_bias else theirs.ndim - 2
    size = theirs.shape[axis]
    rows = {
        "whole": range(size),
        "first half": range(size // 2),
        "second half": range(size // 2, size),
        "even": range(0, size, 2),
        "odd": range(1, size, 2),
    }[way.rows]
    return np.stack([np.take(theirs, row, axis) for row in rows], axis)


def _boxes(shape):
    """The whole, single elements, and random boxes; some are empty."""
    chance = random.Random(0)
    yield whole(shape)
    yield tuple(slice(size - 1, size) for size in shape)
    for _ in range(12):
        ends = [sorted(chance.choices(range(size + 1), k=2)) for size in shape]
        yield tuple(slice(first, last) for first, last in ends)


@pytest.mark.parametrize(("name", "shape", "way"), CASES)
def test_pieces_hold_the_values_of_the_box(name, shape, way):
    stored = Stored(name, shape, way)
    count = itertools.count(0, 1000)
    theirs = {
        tensor: np.arange(prod(size)).reshape(size) + next(count)
        for tensor, size in stored.tensors().items()
    }
    if "{expert}" in way.name:
        ours = np.stack([_slow(theirs[way.name.format(expert=e)], name, way) for e in range(3)])
    else:
        ours = _slow(theirs[way.name], name, way)
    assert ours.shape == shape
    for box in _boxes(shape):
        found = np.full(sizes(box), -1)
        times = np.zeros(sizes(box))
        for piece in stored.pieces(box):
            values = theirs[piece.tensor][piece.theirs]
            at = inside(piece.ours, box)
            found[at] = np.swapaxes(values, -1, -2) if piece.transposed else values
            times[at] += 1
        np.testing.assert_array_equal(found, ours[box])
        assert (times == 1).all()


@pytest.mark.parametrize("largest", [1, 2, 5, 7, 30, 1000])
def test_cut_covers_a_tensor_once(largest):
    for shape in ((4, 3, 5), (7,), ()):
        times = np.zeros(shape)
        for part in cut(shape, largest):
            times[part] += 1
            assert prod(sizes(part)) <= max(largest, prod(shape[1:]))
        assert (times == 1).all()
