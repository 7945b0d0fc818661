"""Settings of a job on top of a model: by device, by stage of an indexer."""

import pytest

from titan_moe.config.job_config import JobConfig
from titan_moe.models.registry import model_config
from titan_moe.parallelize.policies import resolve_model


@pytest.mark.parametrize(
    ("device", "compute", "key", "expected"),
    [
        ("cuda", "bfloat16", None, 8),
        ("cuda", "bfloat16", 1, 1),
        ("cuda", "float32", None, 1),
        ("cpu", "bfloat16", None, 128),
        ("cpu", "float32", None, 1),
        (None, "bfloat16", None, 1),
    ],
)
def test_row_alignment_by_device_and_type(device, compute, key, expected):
    tables = {"training": {"mixed_precision_param": compute}, "moe": {"row_alignment": key}}
    config = resolve_model(model_config("qwen3", "gate"), JobConfig.model_validate(tables), device)
    assert config.moe is not None and config.moe.row_alignment == expected
