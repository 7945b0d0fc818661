"""What float8 needs: a package, units, types, sizes."""

import importlib.util

import pytest

from tests.support.config_checks import problems

_FLOAT8 = '--model.converters ["quantize.linear.float8","quantize.grouped_mm.float8"]'
_EMULATED = f"{_FLOAT8} --quantize.linear.float8.emulate true"


def test_float8_units_want_bfloat16_and_whole_rows() -> None:
    wide = f"{_FLOAT8} --training.mixed_precision_param float32 --training.seq_len 40"
    first, second = problems(wide + " --training.local_batch_size 1", gpus=1)
    assert first.startswith("training.mixed_precision_param=float32: float8 products of a GPU go")
    assert "1 sequences / cp x tp 1 are 40 tokens" in second and "a multiple of 16" in second


def test_float8_experts_want_experts() -> None:
    (line,) = problems(_EMULATED, moe=False)
    assert "grouped_mm.float8: deepseek_v3 debugmodel has no experts; leave it out" in line


def test_float8_without_torchao_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (line,) = problems(_EMULATED)
    assert "needs torchao, which is not installed: pip install '.[float8]'" in line
