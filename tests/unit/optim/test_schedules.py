"""lr_factor against values computed by hand."""

import pytest
import torch

from titan_moe.config.job_config import JobConfig, LRScheduler
from titan_moe.optim.schedules import lr_factor, set_lr, warn_of_raised_rate


def factors(steps, training_steps=20, **keys):
    config = LRScheduler(**keys)
    return [lr_factor(step, config, training_steps) for step in steps]


def test_warmup_stable_decay():
    keys = {"warmup_steps": 4, "decay_ratio": 0.5}
    actual = factors([1, 2, 3, 4, 5, 10, 11, 15, 19, 20], **keys)
    assert actual == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.9, 0.5, 0.1, 0])


@pytest.mark.parametrize(
    ("decay_type", "expected"),
    [
        ("linear", [0.8, 0.6, 0.2]),
        ("sqrt", [0.6, 1 - 0.8 * 0.5**0.5, 0.2]),
        ("cosine", [0.2 + 0.8 * (1 + 0.5**0.5) / 2, 0.6, 0.2]),
    ],
)
def test_decay_shapes_down_to_the_least_factor(decay_type, expected):
    keys = {"warmup_steps": 0, "decay_ratio": 0.4, "decay_type": decay_type, "min_lr_factor": 0.2}
    assert factors([1, 12], **keys) == [1, 1]
    assert factors([14, 16, 20], **keys) == pytest.approx(expected)
    assert factors([20, 21, 99], **keys) == [0.2, 0.2, 0.2]


def test_set_lr_scales_each_group_by_its_own_peak():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = zip(weights, (0.5, 4.0), strict=True)
    optimizer = torch.optim.AdamW([{"params": [w], "peak_lr": peak} for w, peak in groups])
    set_lr(optimizer, 0.25)
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 2.0]


def test_a_rate_that_rises_at_a_resume_is_told(caplog: pytest.LogCaptureFixture) -> None:
    keys = {"lr_scheduler": {"warmup_steps": 10, "min_lr_factor": 0.05}, "optimizer": {"lr": 4e-3}}
    before = JobConfig(**keys, training={"steps": 300})
    longer = JobConfig(**keys, training={"steps": 600})
    schedule = {**keys["lr_scheduler"], "total_steps": 300}
    kept = JobConfig(**keys | {"lr_scheduler": schedule}, training={"steps": 600})
    record = before.model_dump(mode="json")
    warn_of_raised_rate(record, before.model_dump(), 300)
    warn_of_raised_rate(record, longer.model_dump(), 0)
    warn_of_raised_rate(record, kept.model_dump(), 300)
    warn_of_raised_rate({}, longer.model_dump(), 300)
    assert caplog.text == ""
    warn_of_raised_rate(record, longer.model_dump(), 300)
    assert "step 300 was taken at 0.0002, and is 0.0021" in caplog.text
    assert "lr_scheduler.total_steps=300 keeps" in caplog.text
