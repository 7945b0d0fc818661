"""float8 and compiled layers on CUDA: against their emulation, and against what they replace."""

import pytest
import torch

from tests.support.precision import (
    GROUPED_NEEDS,
    LINEAR_NEEDS,
    compiled_losses,
    float8_errors,
    lacks,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.skipif(lacks(LINEAR_NEEDS), reason="needs float8 units")
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "tensorwise"])
def test_a_float8_linear_is_what_its_emulation_says(recipe: str):
    assert all(error < 1e-2 for error in float8_errors(recipe).values())


@pytest.mark.skipif(lacks(LINEAR_NEEDS, (9, 0)), reason="needs Hopper, and nothing later")
def test_a_blockwise_linear_is_what_its_emulation_says():
    assert all(error < 1e-2 for error in float8_errors("blockwise").values())


@pytest.mark.skipif(lacks((10, 0)), reason="needs Blackwell's mxfp8 units")
def test_mxfp8_experts_are_what_their_emulation_says():
    assert all(error < 1e-2 for error in float8_errors("mxfp8").values())


@pytest.mark.skipif(lacks(GROUPED_NEEDS), reason="needs Hopper's float8 units")
def test_float8_experts_are_what_their_emulation_says():
    assert all(error < 1e-2 for error in float8_errors("grouped").values())


@pytest.mark.parametrize(
    "float8",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(lacks(GROUPED_NEEDS), reason="needs Hopper's float8 units"),
        ),
    ],
)
def test_compiled_layers_train_alike_and_are_compiled_once(float8: bool):
    eager, _ = compiled_losses(enable=False, float8=float8)
    compiled, graphs = compiled_losses(enable=True, float8=float8)
    assert compiled == pytest.approx(eager, rel=2e-2)
    assert graphs[1] == graphs[-1]
