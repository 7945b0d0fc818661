"""Tables that are made once, by one process, and memory-mapped by all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_moe.config.errors import ConfigError
from titan_moe.runtime.errors import disk_remedy
from titan_moe.runtime.files import replacing


def cached_table(
    kind: str, files: Sequence[Path], schema: Any, read_batches: Callable[[], Iterator[Any]]
) -> Any:
    """A memory-mapped Arrow table, from the cache if it was made before of the same files.

    Files are the same by name, size and time. The cache is that of `datasets` (HF_HOME). What is
    damaged there is made anew.

    Args:
        kind: what is made of the files: other tables of them have other names.
        schema: of the batches.
        read_batches: gives Arrow batches; what it raises is passed on, and nothing is kept.

    ConfigError where the cache cannot be written.
    """
    import filelock
    import pyarrow as pa

    path = _folder() / f"{_digest(kind, files)}.arrow"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_suffix(".lock")):
            try:
                return _read(path)
            except (OSError, pa.ArrowInvalid):  # Missing, or damaged.
                _write(path, schema, read_batches())
                return _read(path)
    except OSError as error:
        place = Path(error.filename or ".")
        if not (place.is_relative_to(path.parent) or place in path.parents):
            raise  # Of the data. A folder that cannot be made is named by its first part.
        line = (
            f"{path.parent}, where data sets are kept as they are read, cannot be written: "
            f"{error.strerror}: {disk_remedy(error) or 'allow it'}, or set HF_HOME to a folder of "
            "another disk"
        )
        raise ConfigError([line]) from None


def _read(path: Path) -> Any:
    """A file of Arrow's ends with its table of contents: one that was cut short is seen to be. A
    stream of Arrow's that was cut between two batches would be a shorter table."""
    import pyarrow as pa

    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _write(path: Path, schema: Any, batches: Iterator[Any]) -> None:
    import pyarrow as pa

    with (
        replacing(path) as aside,
        aside.open("wb") as file,
        pa.ipc.new_file(file, schema) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch)


def _folder() -> Path:
    import huggingface_hub.constants

    place = os.environ.get("HF_DATASETS_CACHE")
    return Path(place or f"{huggingface_hub.constants.HF_HOME}/datasets") / "titan_moe"


def _digest(kind: str, files: Sequence[Path]) -> str:
    stats = [(str(path.resolve()), path.stat()) for path in files]
    listing = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.blake2b(repr((kind, listing)).encode(), digest_size=16).hexdigest()
