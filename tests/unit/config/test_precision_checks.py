"""What float8 needs: units, types, sizes."""

from typing import get_args

import pytest

from tests.support.config_checks import problems
from titan_moe.config.checks import precision
from titan_moe.config.job_config import Float8Linear
from titan_moe.ops.float8 import alignment

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


_MX = '--model.converters ["quantize.grouped_mm.mx"]'
_EMULATE = "--quantize.linear.float8.emulate true"


def test_blocks_want_multiples_of_their_size() -> None:
    blockwise = f"{_EMULATED} --quantize.grouped_mm.float8.recipe_name blockwise"
    (line,) = problems(blockwise)
    assert line.startswith(
        "model.converters=quantize.grouped_mm.float8 wants multiples of 128, and dim of "
    )
    assert problems(f"{_MX} {_EMULATE}") == []
    (line,) = problems(f"{_MX} {_EMULATE} --parallelism.expert_tensor_parallel_degree 16", ranks=16)
    assert "quantize.grouped_mm.mx wants multiples of 32" in line and "is 16: leave it out" in line


def test_a_microbatch_is_whole_blocks() -> None:
    linear = '--model.converters ["quantize.linear.float8"] --training.local_batch_size 1'
    recipe = "--quantize.linear.float8.recipe_name blockwise"
    (line,) = problems(f"{linear} {recipe} --training.seq_len 96", gpus=1)
    assert "are 96 tokens" in line and "a multiple of 128: choose a multiple of 128" in line


def test_experts_multiply_in_one_way() -> None:
    both = '--model.converters ["quantize.grouped_mm.float8","quantize.grouped_mm.mx"]'
    (line,) = problems(f"{both} {_EMULATE}")
    assert line.endswith(
        "quantize.grouped_mm.float8 and quantize.grouped_mm.mx are for the same products: choose "
        "one"
    )


def test_a_recipe_without_a_known_unit_takes_no_other_one() -> None:
    with pytest.raises(KeyError, match="a third recipe"):
        precision._unit("a third recipe")
    with pytest.raises(KeyError, match="a third recipe"):
        alignment("a third recipe")
    known = get_args(Float8Linear.model_fields["recipe_name"].annotation)
    assert {recipe: precision._unit(recipe) for recipe in known} == {
        recipe: alignment(recipe) for recipe in known
    }
