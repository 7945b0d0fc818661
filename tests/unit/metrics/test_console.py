"""The columns of a console line."""

import io

import pytest

from titan_moe.metrics.sinks import Console

VALUES = {
    "loss": 5.61234567,
    "grad_norm": 1.5,
    "lr": 8e-4,
    "tokens_per_second": 24690.0,
    "tokens_per_second_per_device": 12345.0,
    "tflops_per_device": 412.345,
    "mfu": 0.4169,
    "memory/peak_gib": 71.256,
    "memory/allocation_retries": 2.0,
    "time/data": 0.0123,
    "moe/layers.1/cv": 0.1,
}


def printed(monkeypatch: pytest.MonkeyPatch, *lines: tuple[int, dict[str, float]]) -> list[str]:
    monkeypatch.setattr("time.strftime", lambda form: "13:46:43")
    stream = io.StringIO()
    console = Console(stream, steps=1000)
    for step, values in lines:
        console.write(step, values)
    return stream.getvalue().splitlines()


def test_console_line_has_the_measured_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    full, short = printed(monkeypatch, (7, VALUES), (8, {"loss": 1.0, "lr": 0.0}))
    assert full == (
        "13:46:43 step    7/1000  loss  5.61235  grad norm   1.5000  lr 8.00e-04  "
        "tok/s/dev  12,345  TFLOP/s 412.35  MFU 41.7%  GiB 71.26  retries 2  data s  0.01"
    )
    assert short == "13:46:43 step    8/1000  loss  1.00000  lr 0.00e+00"
