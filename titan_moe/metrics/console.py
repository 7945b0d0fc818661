"""One readable line per logged step; on a terminal a progress bar below, new at every step."""

import time
from typing import Any, TextIO

_DIM, _PLAIN = "\033[2m", "\033[0m"
# What matters most comes first: a narrow terminal cuts off the end.
_BAR = "step {n_fmt}/{total_fmt}{postfix}, {remaining} left {bar}"

_COLUMNS = (
    ("loss", "loss", "{:8.5f}"),
    ("grad norm", "grad_norm", "{:8.4f}"),
    ("lr", "lr", "{:.2e}"),
    ("tok/s/dev", "tokens_per_second_per_device", "{:7,.0f}"),
    ("TFLOP/s", "tflops_per_device", "{:6.2f}"),
    ("MFU", "mfu", "{:5.1%}"),
    ("GiB", "memory/peak_gib", "{:5.2f}"),
    ("retries", "memory/allocation_retries", "{:.0f}"),
    ("data s", "time/data", "{:5.2f}"),
    # Last, for they are missing from most lines.
    ("dropped", "dispatch/dropped", "{:.2%}"),
    ("val loss", "validation_loss", "{:8.5f}"),
)


class Console:
    """Prints the metrics a reader wants at every logged step; what a run does not measure is left
    out.

    Args:
        stream: standard output, but for tests.
        steps: the run's last step.
        resume_step: the step it starts after.
        color: dim the labels, where the stream is a terminal.
    """

    def __init__(self, stream: TextIO, *, steps: int, resume_step: int, color: bool) -> None:
        self._stream = stream
        self._of_all = f"{{:{len(str(steps))}d}}/{steps}"
        self._color = color and stream.isatty()
        self._gib: float | None = None
        self._bar: Any = None
        if stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=steps,
                initial=resume_step,
                file=stream,
                bar_format=_BAR,
                dynamic_ncols=True,
                leave=False,
                miniters=1,  # Left out, tqdm guesses how many steps it can skip.
                mininterval=0,
            )

    def progress(self, loss: float, step_tokens: int) -> None:
        """A step of `step_tokens` tokens has ended: on a terminal, move the bar. Takes nothing that
        the device would have to be asked for."""
        if self._bar is None:
            return
        steps_per_second = self._bar.format_dict["rate"] or 0.0
        words = [f"loss {loss:.4f}"]
        if steps_per_second:
            words.append(f"{steps_per_second * step_tokens:,.0f} tok/s")
        if self._gib is not None:
            words.append(f"{self._gib:.2f} GiB")
        self._bar.set_postfix_str(", ".join(words), refresh=False)
        self._bar.update()

    def write(self, step: int, values: dict[str, float]) -> None:
        self._gib = values.get("memory/peak_gib")
        now = time.strftime("%H:%M:%S step")
        columns = [(now, self._of_all.format(step)), *format_columns(values)]
        line = "  ".join(self._label(label) + text for label, text in columns)
        if self._bar is None:
            self._stream.write(f"{line}\n")  # At once: another thread may warn of its sink now.
            self._stream.flush()
        else:
            self._bar.write(line, file=self._stream)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _label(self, label: str) -> str:
        return f"{_DIM}{label}{_PLAIN} " if self._color else f"{label} "


def format_columns(values: dict[str, float]) -> list[tuple[str, str]]:
    """(label, text) of the metrics that are there, in widths that line up from step to step."""
    return [
        (label, template.format(values[key])) for label, key, template in _COLUMNS if key in values
    ]
