"""float8 and compiled layers on CUDA, beside what they replace."""

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


@pytest.mark.parametrize(
    "what, needs",
    [
        ("rowwise", LINEAR_NEEDS),
        ("rowwise_with_gw_hp", LINEAR_NEEDS),
        ("tensorwise", LINEAR_NEEDS),
        ("grouped", GROUPED_NEEDS),
        ("mxfp8", (10, 0)),
    ],
)
def test_float8_products_are_near_exact_ones(what: str, needs: tuple[int, int]):
    if lacks(needs):
        pytest.skip(f"needs compute capability {needs}")
    assert all(error < 0.1 for error in float8_errors(what).values())


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
