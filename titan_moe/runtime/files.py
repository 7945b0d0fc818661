"""Files and folders of earlier runs."""

from collections.abc import Callable
from pathlib import Path


def set_aside(path: Path, name: Callable[[int], str]) -> Path:
    """Rename a file or folder to the first of name(1), name(2), ... that is free beside it; returns
    where it is then."""
    number = 1
    while (target := path.with_name(name(number))).exists():
        number += 1
    return path.rename(target)
