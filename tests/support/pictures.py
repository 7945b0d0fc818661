"""Asserts on pictures."""

from pathlib import Path

from matplotlib.image import imread


def assert_drawn(path: Path) -> tuple[int, int]:
    """The picture can be read, and each quarter of it has ink; returns its height and width."""
    pixels = imread(path)
    height, width = pixels.shape[:2]
    for rows in (slice(0, height // 2), slice(height // 2, None)):
        for columns in (slice(0, width // 2), slice(width // 2, None)):
            assert pixels[rows, columns, :3].min() < 0.9, "a quarter of the picture is empty"
    return height, width
