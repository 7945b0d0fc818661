"""lr_factor against values computed by hand."""

import re

import pytest
import torch
from transformers import get_inverse_sqrt_schedule

from titan_moe.config.job_config import JobConfig, LRScheduler
from titan_moe.optim.schedules import lr_factor, set_lr, warn_of_changed_rate


def factors(steps, training_steps=20, **keys):
    return [lr_factor(step, LRScheduler(**keys), training_steps) for step in steps]


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


@pytest.mark.parametrize(
    ("decay_ratio", "begin"), [(None, 10), (0.75, 100)], ids=["from the warm-up", "later"]
)
def test_inverse_sqrt_is_that_of_transformers(decay_ratio: float | None, begin: int) -> None:
    """A schedule that stays at the peak up to step 100 takes that as the time scale."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_inverse_sqrt_schedule(optimizer, num_warmup_steps=begin).lr_lambdas[0]
    keys = {"warmup_steps": 10, "decay_type": "inverse_sqrt", "decay_ratio": decay_ratio}
    steps = [1, 9, 10] if decay_ratio is None else []
    steps += [begin, begin + 1, 123, 399, 400, 500, 100_000]
    expected = [theirs(step) for step in steps]
    assert factors(steps, training_steps=400, **keys) == pytest.approx(expected, rel=1e-15)


def test_set_lr_scales_each_group_by_its_own_peak():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = zip(weights, (0.5, 4.0), strict=True)
    optimizer = torch.optim.AdamW([{"params": [w], "peak_lr": peak} for w, peak in groups])
    set_lr(optimizer, 0.25)
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 2.0]


_INVERSE = {"decay_type": "inverse_sqrt"}


def record(training_steps=300, lr=4e-3, **schedule):
    schedule = {"warmup_steps": 10, "min_lr_factor": 0.05} | schedule
    tables = {"lr_scheduler": schedule, "optimizer": {"lr": lr}}
    return JobConfig(**tables, training={"steps": training_steps}).model_dump(mode="json")


@pytest.mark.parametrize(
    ("now", "step", "words"),
    [
        (record(600), 300, "step 301 would have been taken at 0.0002 by .* at 0.00213; lr_"),
        (record(600), 20, "step 21 .* 0.00386 by .* at 0.00393; lr_scheduler.total_steps=300"),
        (record(290), 20, "step 21 .* at 0.00385; lr_scheduler.total_steps=300 keeps the earlier"),
        (record(600), 5, "step 11 would have been taken"),
        (record(lr=3e-3), 5, "step 6 .* at 0.0024 by .* at 0.0018; optimizer.lr=0.004 keeps"),
        (record(decay_type="cosine", warmup_steps=20), 5, 'up_steps=10 lr_.*type="linear" keeps'),
        (record(decay_ratio=0.5), 5, "lr_scheduler.decay_ratio=null keeps"),
        (record(**_INVERSE), 5, 'step 11 .* lr_scheduler.decay_type="linear" keeps'),
    ],
)
def test_resume_at_another_learning_rate_names_both_and_what_keeps_the_first(
    now, step, words, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_changed_rate(record(), now, step)
    (line,) = caplog.messages
    assert re.search(words, line), line


@pytest.mark.parametrize(
    ("before", "now", "step"),
    [
        (record(), record(), 300),
        (record(), record(600), 0),
        (record(), record(600, total_steps=300), 300),
        (record(), record(total_steps=300), 20),
        (record(decay_ratio=0.1), record(280, decay_ratio=0.1, total_steps=300), 20),
        ({}, record(600), 300),
        (record(**_INVERSE), record(600, **_INVERSE), 300),
    ],
)
def test_resume_at_the_same_learning_rates_says_nothing(before, now, step, caplog) -> None:
    warn_of_changed_rate(before, now, step)
    assert caplog.messages == []
