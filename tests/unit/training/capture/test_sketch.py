"""Sketches add up over shards of a tensor, and no difference hides from them."""

import pytest
import torch

from titan_moe.training.capture.sketch import sketch_box, sketch_experts, sketch_rows


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def whole(x: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in x.shape)


def test_columns_of_rows_add_up():
    x_NF = drawn(5, 12)
    both = sketch_rows(x_NF[:, :7]) + sketch_rows(x_NF[:, 7:], 7)
    torch.testing.assert_close(both, sketch_rows(x_NF))


@pytest.mark.parametrize("shape", [(10,), (10, 6)])
@pytest.mark.parametrize("dim", [0, -1])
def test_boxes_of_a_tensor_add_up(shape: tuple[int, ...], dim: int):
    x = drawn(*shape)
    cut = 3
    first, last = x.tensor_split([cut], dim)
    boxes = [list(whole(x)), list(whole(x))]
    boxes[0][dim], boxes[1][dim] = slice(0, cut), slice(cut, shape[dim])
    both = sketch_box(first, boxes[0]) + sketch_box(last, boxes[1])
    torch.testing.assert_close(both, sketch_box(x, whole(x)))
    torch.testing.assert_close(both.square().mean(), x.square().sum(), rtol=0.5, atol=0)


def test_long_tensors_are_taken_in_chunks(monkeypatch):
    x_NF = drawn(50, 8)
    rows, box = sketch_rows(x_NF), sketch_box(x_NF, whole(x_NF))
    monkeypatch.setattr("titan_moe.training.capture.sketch._CHUNK", 24)
    torch.testing.assert_close(sketch_rows(x_NF), rows)
    torch.testing.assert_close(sketch_box(x_NF, whole(x_NF)), box)


def test_two_elements_that_change_places_are_seen():
    x_F = drawn(1, 64)
    swapped_F = x_F.clone()
    swapped_F[0, [3, 40]] = x_F[0, [40, 3]]
    assert not torch.allclose(sketch_rows(x_F), sketch_rows(swapped_F))


def test_nothing_is_zeros():
    assert sketch_box(torch.empty(0, 3), (slice(5, 5), slice(0, 3))).eq(0).all()
    assert len(sketch_experts(torch.empty(0, 2, 3), whole(torch.empty(0, 2, 3)))) == 0
    assert len(sketch_rows(torch.empty(0, 3))) == 0
