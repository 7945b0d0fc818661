"""De-quantising, value by value and against transformers."""

from itertools import product

import pytest
import torch
from safetensors.torch import save_file

from tests.support.refusals import failure
from titan_moe.checkpoint.hf.folder import HFFolder
from titan_moe.checkpoint.hf.pieces import whole
from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import RunError

_BLOCKS = '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 5]}}'
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def _folder(path, tensors, settings="{}"):
    (path / "config.json").write_text(settings)
    save_file(tensors, path / "model.safetensors")
    return HFFolder(path)


def _assert_means(folder, name, dtype, meaning, *boxes):
    """Compares a tensor, and boxes of it, with what each value means, one by one."""
    shape = folder.shapes[name]
    slow = torch.empty(shape, dtype=dtype)
    for index in product(*map(range, shape)):
        slow[index] = meaning(*index)
    for box in (whole(shape), *boxes):
        found = folder.read(name, box)
        assert found.dtype == dtype and torch.equal(found, slow[box])


def test_block_float8_is_each_value_times_the_scale_of_its_block(tmp_path):
    weight, scales = torch.randn(10, 13).to(torch.float8_e4m3fn), torch.rand(3, 3) + 0.5
    tensors = {"w.weight": weight, "w.weight_scale_inv": scales, "norm": torch.ones(3)}
    folder = _folder(tmp_path, tensors, _BLOCKS)
    assert folder.shapes == {"w.weight": (10, 13), "norm": (3,)}

    def meaning(row, column):
        return weight[row, column].float() * scales[row // 4, column // 5]

    boxes = (slice(3, 9), slice(4, 11)), (slice(9, 10), slice(0, 13, 2))
    _assert_means(folder, "w.weight", torch.float32, meaning, *boxes)


def _mxfp4(path, experts=2, rows=6, groups=3):
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (experts, rows, groups), dtype=torch.uint8)
    tensors = {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}
    return blocks, scales, _folder(path, tensors)


def test_mxfp4_is_two_values_a_byte_times_a_power_of_two(tmp_path):
    blocks, scales, folder = _mxfp4(tmp_path)
    assert folder.shapes == {"e.down_proj": (2, 96, 6)}

    def meaning(expert, column, row):
        byte = int(blocks[expert, row, column // 32, column % 32 // 2])
        nibble = byte >> 4 if column % 2 else byte & 15
        value = FP4[nibble & 7] * (-1 if nibble & 8 else 1)
        return value * 2.0 ** (int(scales[expert, row, column // 32]) - 127)

    boxes = (
        (slice(1, 2), slice(5, 70), slice(1, 5)),
        (slice(0, 2), slice(33, 34), slice(1, 6, 2)),
    )
    _assert_means(folder, "e.down_proj", torch.bfloat16, meaning, *boxes)


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path):
    from transformers.integrations import mxfp4

    blocks, scales, folder = _mxfp4(tmp_path, rows=64, groups=4)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(folder.read("e.down_proj", whole((2, 128, 64))), theirs)


_WEIGHTS = '{"num_bits": 4, "type": "int", "symmetric": true, "group_size": 32}'
_INT4 = (
    '{"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", '
)
_INT4 += '"config_groups": {"group_0": {"weights": %s}}}}'


def test_packed_int4_is_eight_values_a_number_times_the_scale_of_their_group(tmp_path):
    numbers = torch.randint(-(2**31), 2**31, (3, 8), dtype=torch.int32)
    scales = (torch.rand(3, 2) + 0.5).bfloat16()
    tensors = {"w_packed": numbers, "w_scale": scales, "w_shape": torch.tensor([3, 64])}
    folder = _folder(tmp_path, tensors, f'{{"text_config": {_INT4 % _WEIGHTS}}}')
    assert folder.shapes == {"w": (3, 64)}

    def meaning(row, column):
        bits = (int(numbers[row, column // 8]) % 2**32) >> (column % 8 * 4)
        return (bits % 16 - 8) * float(scales[row, column // 32])

    boxes = (slice(1, 3), slice(13, 50)), (slice(0, 1), slice(1, 64, 2))
    _assert_means(folder, "w", torch.float32, meaning, *boxes)


_NUMBERS = torch.zeros(3, 8, dtype=torch.int32)
_FLOAT8 = torch.ones(10, 13).to(torch.float8_e4m3fn)
_NAN, _INF = float("nan"), float("inf")


def _but(tensor, value):
    """Returns a tensor with another value in the middle."""
    tensor = tensor.clone()
    tensor.view(-1)[tensor.numel() // 2] = value
    return tensor


@pytest.mark.parametrize(
    ("tensors", "settings"),
    [
        *(
            ({"w": _but(torch.ones(9, 7, dtype=dtype), value)}, "{}")
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
            for value in (_NAN, _INF, -_INF)
        ),
        ({"w": _but(_FLOAT8, _NAN), "w_scale_inv": torch.ones(3, 3)}, _BLOCKS),
        ({"w": _FLOAT8, "w_scale_inv": _but(torch.ones(3, 3), _INF)}, _BLOCKS),
        ({"w": _FLOAT8, "w_scale_inv": _but(torch.ones(3, 3), 3e38) * 200}, _BLOCKS),
        ({"w_packed": _NUMBERS, "w_scale": _but(torch.ones(3, 2), _NAN)}, _INT4 % _WEIGHTS),
        (
            {
                "w_blocks": torch.full((1, 2, 3, 16), 0x35, dtype=torch.uint8),
                "w_scales": _but(torch.full((1, 2, 3), 127, dtype=torch.uint8), 255),
            },
            "{}",
        ),
    ],
)
def test_a_value_that_is_not_finite_is_refused(tensors, settings, tmp_path):
    folder = _folder(tmp_path, tensors, settings)
    line = f"{tmp_path}/model.safetensors: w has values that are NaN or infinite in "
    assert line in failure(folder.read, "w", whole(folder.shapes["w"]))


@pytest.mark.parametrize(
    ("tensors", "settings", "line"),
    [
        ({"w": _FLOAT8}, "{}", "w is there without w_scale_inv"),
        ({"w": _FLOAT8, "w_scale_inv": torch.ones(1, 1)}, "{}", "weight_block_size"),
        ({"w": _FLOAT8, "w_scale_inv": torch.ones(3, 2)}, _BLOCKS, r"needs \[3, 3\]"),
        ({"w": torch.ones(3)}, _BLOCKS.replace("fp8", "gptq"), "quant_method='gptq'"),
        ({"w": torch.ones(3)}, _BLOCKS.replace("5]", '"5"]'), "must be two sizes"),
        ({"e_blocks": torch.zeros(1, 2, 3, 16, dtype=torch.uint8)}, "{}", "without e_scales"),
        ({"w_packed": _NUMBERS}, _INT4 % _WEIGHTS, "w_packed is there without w_scale"),
        ({"w_packed": _NUMBERS, "w_scale": torch.ones(3, 3)}, _INT4 % _WEIGHTS, "do not belong"),
        ({"w": torch.ones(3)}, _INT4 % _WEIGHTS.replace("true", "false"), "only 'fp8', 'mxfp4' or"),
        ({"w": torch.ones(3).char()}, "{}", "w holds torch.int8: name unquantised weights"),
        (
            {"e": torch.ones(1), "e_blocks": torch.zeros(1, 2, 3, 16, dtype=torch.uint8)},
            "{}",
            "e and e_blocks are both there: remove one",
        ),
    ],
)
def test_unknown_or_incomplete_quantisation_is_refused(tensors, settings, line, tmp_path):
    with pytest.raises((RunError, ConfigError), match=line):
        _folder(tmp_path, tensors, settings).read("w", whole((3,)))
