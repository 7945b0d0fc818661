"""The console line: what is in it, that it lines up, and the bar that a terminal has."""

import io
import re

import pytest

from titan_moe.metrics.console import Console

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


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _the_time_of_day(monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: form.replace("%H:%M:%S", "13:46:43"))


def printed(stream, *lines, color=True):
    console = Console(stream, steps=1000, resume_step=0, color=color)
    for step, values in lines:
        console.write(step, values)
    console.close()
    return stream.getvalue()


def test_a_log_file_gets_one_plain_line():
    assert printed(io.StringIO(), (7, VALUES)) == (
        "13:46:43 step    7/1000  loss  5.61235  grad norm   1.5000  lr 8.00e-04  "
        "tok/s/dev  12,345  TFLOP/s 412.35  MFU 41.7%  GiB 71.26  retries 2  data s  0.01\n"
    )


def test_lines_of_different_steps_line_up():
    later = {**VALUES, "loss": 11.5, "grad_norm": 0.01, "mfu": 0.05, "validation_loss": 2.5}
    first, second = printed(io.StringIO(), (1, VALUES), (1000, later)).splitlines()
    assert second.endswith("  val loss  2.50000")
    for label in ("loss", "grad norm", "lr", "TFLOP/s", "MFU", "retries", "data s"):
        assert first.index(label) == second.index(label)


def test_what_is_not_measured_is_left_out():
    line = printed(io.StringIO(), (1, {"loss": 1.0, "lr": 0.0}))
    assert line == "13:46:43 step    1/1000  loss  1.00000  lr 0.00e+00\n"


def test_a_terminal_gets_the_line_and_a_bar():
    text = printed(Terminal(), (250, VALUES))
    assert "\033[2mloss\033[0m  5.61235" in text
    assert "step 0/1000" in text
    assert "\033[2m" not in printed(Terminal(), (250, VALUES), color=False)


def steps(stream, *, logged):
    """Five steps of 1000 tokens, a second each, of which the second is logged or none."""
    console = Console(stream, steps=10, resume_step=5, color=False)
    for step in range(6, 11):
        console.progress(1 / step, 1000)
        if step == 7 and logged:
            console.write(step, VALUES)
    return stream.getvalue()


@pytest.fixture
def _a_second_a_step(monkeypatch):
    from tqdm import std

    clock = iter(range(1000))
    monkeypatch.setattr(std, "time", lambda: next(clock))


@pytest.mark.usefixtures("_a_second_a_step")
def test_the_bar_moves_at_every_step_and_keeps_what_was_logged_last():
    text = steps(Terminal(), logged=True)
    shown = re.findall(r"step (\d+)/10, loss ([.\d]+)", text)
    assert list(dict.fromkeys(shown)) == [(str(step), f"{1 / step:.4f}") for step in range(6, 11)]
    last = text.split("\r")[-1]
    assert "tok/s" in last and "71.26 GiB" in last and "00:00 left" in last
    assert "GiB" not in text[: text.index("step  7/10")], "not measured before"


def test_without_a_terminal_only_logged_steps_say_anything():
    assert steps(io.StringIO(), logged=False) == ""
    assert steps(io.StringIO(), logged=True).count("\n") == 1
