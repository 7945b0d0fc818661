"""Which products run in low precision, what their rows are padded to, and what a GPU must have."""

from typing import Any

import pytest
import torch

from titan_moe.config.checks import precision
from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Quantize
from titan_moe.models import quantize
from titan_moe.models.quantize import GROUPED_MM, GROUPED_MX, LINEAR, check_hardware, row_alignment
from titan_moe.ops.float8 import alignment

GPU = torch.device("cuda", 0)


def section(**recipes: str) -> Quantize:
    tables: dict[str, Any] = {
        table: {"float8": {"recipe_name": recipe}} for table, recipe in recipes.items()
    }
    return Quantize.model_validate(tables)


@pytest.mark.parametrize(
    "converters, recipe, rows",
    [
        ([], "rowwise", 1),
        ([LINEAR], "rowwise", 1),
        ([LINEAR, GROUPED_MM], "rowwise", 16),
        ([GROUPED_MX], "rowwise", 32),
        ([GROUPED_MM], "blockwise", 128),
    ],
)
def test_rows_of_an_expert(converters: list[str], recipe: str, rows: int) -> None:
    assert row_alignment(converters, section(grouped_mm=recipe)) == rows


def test_the_checks_know_the_sizes() -> None:
    for recipe in ("rowwise", "tensorwise", "blockwise"):
        assert precision._unit(recipe) == alignment(recipe)


@pytest.mark.parametrize(
    "converters, recipes, capability, cuda, line",
    [
        ([GROUPED_MX], {}, (9, 0), "13.0", "grouped_mm.mx needs a GPU of compute capability 10.0"),
        ([GROUPED_MX], {}, (10, 0), "13.0", ""),
        ([GROUPED_MM], {}, (9, 0), "13.0", ""),
        ([LINEAR], {"linear": "blockwise"}, (9, 0), "12.9", ""),
        ([LINEAR], {"linear": "blockwise"}, (9, 0), "12.8", "with CUDA 12.8: choose rowwise"),
        ([LINEAR], {"linear": "blockwise"}, (10, 0), "13.0", "compute capability 9.0 and torch"),
        ([GROUPED_MM], {"grouped_mm": "blockwise"}, (9, 0), "13.0", "needs the package deep_gemm"),
    ],
)
def test_hardware(
    monkeypatch: pytest.MonkeyPatch,
    converters: list[str],
    recipes: dict[str, str],
    capability: tuple[int, int],
    cuda: str,
    line: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(quantize, "has_deep_gemm", lambda: False)
    if not line:
        return check_hardware(converters, section(**recipes), GPU)
    with pytest.raises(ConfigError, match=line):
        check_hardware(converters, section(**recipes), GPU)
    emulated = section(**recipes).model_dump()
    emulated["linear"]["float8"]["emulate"] = True
    return check_hardware(converters, Quantize.model_validate(emulated), GPU)
