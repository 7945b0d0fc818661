"""What several scripts of this folder measure and print in the same way."""

import statistics
import sys
import time
from collections.abc import Sequence

import torch


def torchrun(num_ranks: int, python: str = sys.executable) -> list[str]:
    """The beginning of the command of a job on this machine."""
    return [
        *(python, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={num_ranks}",
    ]


def matmul_tflops(size: int, dtype: torch.dtype, repeats: int = 5) -> float:
    """TFLOP/s of a square matrix product in this process: the median of `repeats`."""
    a, b = torch.randn(2, size, size).to(dtype)
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds[1:]) / 1e12


def best_rate(rates: dict[int, list[float]]) -> float:
    """The rate of the size that is fastest in the median."""
    return max(statistics.median(values) for values in rates.values())


def spread(values: Sequence[float], template: str = "{:,.0f}") -> str:
    """Median, minimum and maximum, as `median (min-max)`."""
    low, middle, high = (
        template.format(value) for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low}-{high})"


def print_row(widths: Sequence[int], cells: Sequence[str]) -> None:
    """One line of a table; a column of negative width is aligned to the left."""
    aligned = (
        f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}"
        for cell, width in zip(cells, widths, strict=True)
    )
    print(" ".join(aligned))
