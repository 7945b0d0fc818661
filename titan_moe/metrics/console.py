"""One readable line per logged step."""

import time
from typing import TextIO

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
    """Prints the metrics that a reader wants; leaves out what a run does not measure.

    Args:
        steps: the run's last step.
    """

    def __init__(self, stream: TextIO, *, steps: int) -> None:
        self._stream, self._steps = stream, steps

    def write(self, step: int, values: dict[str, float]) -> None:
        now, width = time.strftime("%H:%M:%S"), len(str(self._steps))
        columns = [f"{now} step {step:{width}d}/{self._steps}"]
        for label, key, template in _COLUMNS:
            if key in values:
                columns.append(f"{label} {template.format(values[key])}")
        print("  ".join(columns), file=self._stream, flush=True)

    def close(self) -> None:
        pass
