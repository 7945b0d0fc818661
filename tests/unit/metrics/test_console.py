"""The console line: what is in it, that it lines up, and the bar on a terminal."""

import io

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


def printed(stream, *lines, color=True):
    console = Console(stream, steps=1000, resume_step=0, color=color)
    for step, values in lines:
        console.write(step, values)
    console.close()
    return stream.getvalue()


def test_a_log_file_gets_one_plain_line():
    assert printed(io.StringIO(), (7, VALUES)) == (
        "step    7  loss  5.61235  grad norm   1.5000  lr 8.00e-04  tok/s/dev  12,345  "
        "TFLOP/s 412.35  MFU 41.7%  GiB 71.26  retries 2  data s  0.01\n"
    )


def test_lines_of_different_steps_line_up():
    later = {**VALUES, "loss": 11.5, "grad_norm": 0.01, "mfu": 0.05, "validation_loss": 2.5}
    first, second = printed(io.StringIO(), (1, VALUES), (1000, later)).splitlines()
    assert second.endswith("  val loss  2.50000")
    for label in ("loss", "grad norm", "lr", "TFLOP/s", "MFU", "retries", "data s"):
        assert first.index(label) == second.index(label)


def test_what_is_not_measured_is_left_out():
    line = printed(io.StringIO(), (1, {"loss": 1.0, "lr": 0.0}))
    assert line == "step    1  loss  1.00000  lr 0.00e+00\n"


def test_a_terminal_gets_the_line_above_a_bar_with_the_time_left():
    text = printed(Terminal(), (250, VALUES))
    assert "\033[2mloss\033[0m  5.61235" in text
    assert "250/1000" in text
    assert "left" in text


def test_no_color_when_told():
    assert "\033[2m" not in printed(Terminal(), (250, VALUES), color=False)
