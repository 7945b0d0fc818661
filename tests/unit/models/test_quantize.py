"""Padding of rows, and what a GPU must have, for products in low precision."""

from contextlib import nullcontext

import pytest
import torch

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Quantize
from titan_moe.models.quantize import GROUPED_MM, GROUPED_MX, LINEAR, check_hardware, row_alignment

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "converters, rows", [([], 1), ([LINEAR], 1), ([LINEAR, GROUPED_MM], 16), ([GROUPED_MX], 32)]
)
def test_row_alignment_of_experts_follows_type_and_recipe(converters: list[str], rows: int) -> None:
    assert row_alignment(converters, Quantize()) == rows


@pytest.mark.parametrize(
    "converters, capability, line",
    [
        ([GROUPED_MX], (9, 0), "grouped_mm.mx needs a GPU of compute capability 10.0"),
        ([GROUPED_MX], (10, 0), ""),
        ([GROUPED_MM], (9, 0), ""),
    ],
)
def test_check_hardware_error_names_the_needed_capability(
    monkeypatch: pytest.MonkeyPatch, converters: list[str], capability: tuple[int, int], line: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    with pytest.raises(ConfigError, match=line) if line else nullcontext():
        check_hardware(converters, Quantize(), GPU)
    emulated = Quantize.model_validate({"linear": {"float8": {"emulate": True}}})
    check_hardware(converters, emulated, GPU)
