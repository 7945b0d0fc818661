import pytest
import torch

from titan_moe.checkpoint import box_sums
from titan_moe.checkpoint.box_sums import as_digits
from titan_moe.checkpoint.checksum import box_sum, checksums


def _one(tensor):
    return checksums({"x": tensor}, {"x": tensor.shape})["x"]


def _filled(dtype, shape=(5, 7)):
    return torch.randint(-9, 9, shape, generator=torch.manual_seed(0)).to(dtype)


DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_flipped_bit_counts(dtype):
    tensor = _filled(dtype)
    raw = tensor.view(torch.uint8)
    found = {_one(tensor)}
    for bit in range(8):
        raw[3, 4] ^= 1 << bit
        found.add(_one(tensor))
        raw[3, 4] ^= 1 << bit
    assert len(found) == 9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_exchanged_elements_and_rows_count(dtype):
    tensor = torch.arange(1, 36).reshape(5, 7).to(dtype)
    elements, rows = tensor.clone(), tensor[[1, 0, 2, 3, 4]]
    elements[0, 0], elements[4, 6] = tensor[4, 6], tensor[0, 0]
    assert len({_one(tensor), _one(elements), _one(rows)}) == 3


def test_the_place_of_a_round_float64_counts():
    tensor, found = torch.ones(2048, dtype=torch.float64), set()
    for place in range(len(tensor)):
        tensor[place] = 2
        found.add(_one(tensor))
        tensor[place] = 1
    assert len(found) == len(tensor)


def test_chunks_and_strides_change_nothing(monkeypatch):
    tensor = _filled(torch.float32, (3, 4, 10))
    whole = _one(tensor)
    assert _one(tensor.transpose(0, 2).contiguous().transpose(0, 2)) == whole
    for size in (1, 7, 16, 60):
        monkeypatch.setattr(box_sums, "_CHUNK", size)
        assert _one(tensor) == whole


def test_the_memory_can_still_be_given_back():
    """As a change of layout does; Tensor.numpy() would forbid it."""
    tensor = _filled(torch.bfloat16)
    _one(tensor)
    tensor.untyped_storage().resize_(0)


def test_scalars_and_empty_tensors():
    assert _one(torch.tensor(2.0)) != _one(torch.tensor(3.0))
    assert _one(torch.empty(0, 4)) == "0" * 16
    assert checksums({}, {}) == {}


def test_a_written_down_value():
    # Old checkpoints stay verifiable only while this number stays.
    assert _one(torch.arange(10, dtype=torch.float32)) == "4c423b99efd00000"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool], ids=str)
def test_boxes_add_up_however_they_lie(dtype, monkeypatch):
    """Boxes that are one run of the tensor take a shorter way to the same number."""
    tensor = _filled(dtype, (4, 6, 8))
    whole = _one(tensor)
    monkeypatch.setattr(box_sums, "_CHUNK", 20)
    for dim, at in ((0, 1), (1, 2), (2, 5)):
        size = tensor.shape[dim]
        for form in (torch.Tensor.contiguous, lambda box: box):
            total = 0
            for first, length in ((0, at), (at, size - at)):
                box = form(tensor.narrow(dim, first, length))
                total += box_sum(box, [first * (d == dim) for d in range(3)], tensor.shape)
            assert as_digits(total) == whole
