from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.saved_runs import plain_checkpointer
from titan_moe.checkpoint import checksums as module
from titan_moe.checkpoint.checksums import box_sum, checksums, total_sums
from titan_moe.checkpoint.tensors import Chunk
from titan_moe.runtime.errors import RunError


def _one(tensor):
    return checksums({"x": tensor})["x"]


def _filled(dtype, shape=(5, 7)):
    return torch.randint(-9, 9, shape, generator=torch.manual_seed(0)).to(dtype)


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "bfloat16", "float16", "int64", "int32", "int8", "bool"]
)
def test_every_flipped_bit_counts(dtype):
    tensor = _filled(getattr(torch, dtype))
    raw = tensor.view(torch.uint8)
    found = {_one(tensor)}
    for bit in range(8):
        raw[3, 4] ^= 1 << bit
        found.add(_one(tensor))
        raw[3, 4] ^= 1 << bit
    assert len(found) == 9


def test_the_place_of_a_round_float64_counts():
    tensor, found = torch.ones(2048, dtype=torch.float64), set()
    for place in range(len(tensor)):
        tensor[place] = 2
        found.add(_one(tensor))
        tensor[place] = 1
    assert len(found) == len(tensor)


def test_scalars_and_empty_tensors():
    assert _one(torch.tensor(2.0)) != _one(torch.tensor(3.0))
    assert _one(torch.empty(0, 4)) == "0" * 16
    assert checksums({}) == {}


def test_a_written_down_value():
    # Old checkpoints stay verifiable only while this number stays.
    assert _one(torch.arange(10, dtype=torch.float32)) == "4c423b99efd00000"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool], ids=str)
def test_boxes_add_up_however_they_lie(dtype, monkeypatch):
    """Boxes that are one run of the tensor take a shorter way to the same number."""
    tensor = _filled(dtype, (4, 6, 8))
    whole = _one(tensor)
    monkeypatch.setitem(module._BLOCK, "cpu", 20)
    for dim, at in ((0, 1), (1, 2), (2, 5)):
        size = tensor.shape[dim]
        for form in (torch.Tensor.contiguous, lambda box: box):
            sums = []
            for first, length in ((0, at), (at, size - at)):
                box = form(tensor.narrow(dim, first, length))
                starts = [first * (d == dim) for d in range(3)]
                place = tuple(slice(a, a + n) for a, n in zip(starts, box.shape, strict=True))
                sums.append(("x", int(box_sum(box, Chunk("x", place, tuple(tensor.shape), dtype)))))
            assert total_sums(sums) == {"x": whole}


def test_tied_copies_that_differ_stop_a_run(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "tied_weights", lambda config: [["first.weight", "last.weight"]])
    model = nn.ModuleDict({"first": nn.Linear(3, 2), "last": nn.Linear(3, 2)})
    checkpointer = plain_checkpointer(tmp_path, model, model=SimpleNamespace(config=object()))
    line = r"first\.weight and its copies last\.weight are not the same$"
    with pytest.raises(RunError, match="^after step 2 " + line):
        checkpointer.check_replicas(2)
    with pytest.raises(RunError, match="^" + line):
        checkpointer.save(2, {"step": 2})
    assert not checkpointer.folder.exists()
    model["last"].load_state_dict(model["first"].state_dict())
    checkpointer.check_replicas(4)
