"""Writing a file and waiting until it is on disk; no torch."""

import os
from collections.abc import Iterable
from pathlib import Path

Bytes = bytes | memoryview


def write_file(path: Path, contents: Iterable[Bytes]) -> None:
    """Write one buffer after the other, without another copy of them, and wait for the disk."""
    # Where every node has a disk of its own, the folder that rank 0 has made is not there.
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb", buffering=0) as file:
        for each in contents:
            rest = memoryview(each)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
