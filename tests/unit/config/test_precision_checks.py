"""What float8 needs: units, types, sizes."""

from tests.support.config_checks import problems

_FLOAT8 = '--model.converters ["quantize.linear.float8","quantize.grouped_mm.float8"]'
_MX = '--model.converters ["quantize.grouped_mm.mx"]'
_EMULATE = "--quantize.linear.float8.emulate true"
_BFLOAT16 = "--training.mixed_precision_param bfloat16"


def test_float8_units_want_bfloat16_and_whole_rows() -> None:
    wide = f"{_FLOAT8} --training.mixed_precision_param float32 --training.seq_len 40"
    first, second = problems(wide + " --training.local_batch_size 1", gpus=1)
    assert first.startswith("training.mixed_precision_param=float32: float8 products go with")
    assert "1 sequences / cp x tp 1 are 40 tokens" in second and "a multiple of 16" in second


def test_float8_experts_want_experts_and_are_not_emulated() -> None:
    (line,) = problems(f"{_FLOAT8} {_BFLOAT16}", moe=False, gpus=1)
    assert "grouped_mm.float8: deepseek_v3 debugmodel has no experts; leave it out" in line
    (line,) = problems(f"{_FLOAT8} {_EMULATE}")
    assert "quantize.grouped_mm.float8: torchao does not emulate it" in line


def test_mxfp8_experts_want_bfloat16_and_multiples_of_32() -> None:
    emulated = f"{_MX} {_EMULATE} {_BFLOAT16}"
    assert problems(emulated) == []
    (line,) = problems(f"{_MX} {_EMULATE} --training.mixed_precision_param float32")
    assert "float8 products go with bfloat16" in line
    (line,) = problems(f"{emulated} --parallelism.expert_tensor_parallel_degree 16", ranks=16)
    assert "quantize.grouped_mm.mx wants multiples of 32" in line and "is 16: leave it out" in line


def test_experts_multiply_in_one_way() -> None:
    both = '--model.converters ["quantize.grouped_mm.float8","quantize.grouped_mm.mx"]'
    (line,) = problems(f"{both} {_BFLOAT16}", gpus=1)
    assert line.endswith(
        "quantize.grouped_mm.float8 and quantize.grouped_mm.mx are for the same products: choose "
        "one"
    )
