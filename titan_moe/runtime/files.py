"""Files and folders of earlier runs, files that others read while a run writes them, and JSON."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def set_aside(path: Path, name: Callable[[int], str]) -> Path:
    """Rename a file or folder to the first of name(1), name(2), ... that is free beside it; returns
    where it is then."""
    number = 1
    while (target := path.with_name(name(number))).exists():
        number += 1
    return path.rename(target)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, of its suffix, that takes its name when all of it is on disk.

    A reader finds the old content or the new one, and after a kill or an error the old one is left.
    """
    aside = path.with_name(f".tmp-{path.name}")
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        # A write does not say where. A library's error, as of a damaged gzip file, has no number.
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text that no reader sees half of."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def parse_json(content: bytes | str) -> Any:
    """As json.loads. Raises ValueError where it nests too deep, too."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it nests too deep") from None
