"""Inductor's kernels between an expert's products move vectors on Hopper: graphs know the size of a
row."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.support.inductor_sm90 import inductor_ptx
from titan_moe.ops.activation import SWIGLU
from titan_moe.ops.gated import gated_rows, gated_rows_backward

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.__version__[:4] != "2.13", reason="shows Inductor of torch 2.13 a GPU"
    ),
]

ROWS, HIDDEN_DIM = 4096, 768
VECTOR = re.compile(r"ld\.global\S*\.v[24]\.b32")
NARROW = re.compile(r"(?:ld|st)\.global\S*\.[bu]16\b")
DIVISION = re.compile(r"(?:div|rem)\.[su]64")


def kernels(inputs: int, folder: Path, *, knows_sizes: bool) -> list[str]:
    """Returns the PTX of the kernels before an expert's last product, or of their backward."""
    function = backward if inputs == 3 else partial(gated_rows, activation=SWIGLU)
    with FakeTensorMode(shape_env=ShapeEnv()):
        shapes = [(ROWS, HIDDEN_DIM)] * inputs
        rows = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
        args = [*rows, torch.empty(ROWS, 1, device="cuda")]
        if knows_sizes:  # As `ForAnyRows` marks them.
            for x_R in args:
                torch._dynamo.maybe_mark_dynamic(x_R, 0)
        return inductor_ptx(function, args, folder, dynamic=None if knows_sizes else True)


def backward(grad_RF: Tensor, *args: Tensor) -> tuple[Tensor | None, ...]:
    return tuple(gated_rows_backward(grad_RF.clone(), *args, SWIGLU))


@pytest.mark.parametrize("inputs", [2, 3], ids=["forward", "backward"])
def test_compiled_experts_move_vectors(inputs: int, tmp_path: Path):
    ptx = kernels(inputs, tmp_path, knows_sizes=True)
    assert any(VECTOR.search(text) for text in ptx)
    assert not any(NARROW.search(text) or DIVISION.search(text) for text in ptx)


def test_experts_compiled_for_any_sizes_move_two_bytes_and_divide(tmp_path: Path):
    for text in kernels(2, tmp_path, knows_sizes=False):
        assert NARROW.search(text) and DIVISION.search(text) and not VECTOR.search(text)
