"""Watches which files are on disk when a file or a folder gets its name."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock


class DiskOrder:
    """Records waits for the disk, and what a power cut at a rename would have lost."""

    def __init__(self) -> None:
        self.renamed: list[str] = []
        """Names of files and folders, as they got them."""
        self.lost: list[str] = []
        """Renamed things of which a part was not on disk, and folders whose entries were not."""
        self._synced: dict[int, tuple[int, int]] = {}
        self._entries: dict[int, str] = {}

    def note_sync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self._synced[status.st_ino] = _content(status)
        self._entries.pop(status.st_ino, None)

    def note_rename(self, source: Path, target: Path) -> None:
        self.renamed.append(target.name)
        for path in [source, *source.rglob("*")] if source.is_dir() else [source]:
            status = path.stat()
            if self._synced.get(status.st_ino) != _content(status):
                self.lost.append(f"{path.name} as {target.name} got its name")
        self._entries[target.parent.stat().st_ino] = target.name

    def lost_names(self) -> list[str]:
        """Returns renamed files and folders whose new name is not on disk."""
        return list(self._entries.values())


def _content(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


@contextmanager
def watched_disk() -> Iterator[DiskOrder]:
    """Watches this process while the block runs, but for folders that are being deleted, and what
    DCP renames inside of a folder that has no name yet."""
    order = DiskOrder()
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def syncing(descriptor: int) -> None:
        fsync(descriptor)
        order.note_sync(descriptor)

    def renaming(path: Path, target: Path) -> Path:
        if not target.name.endswith((".deleting", ".metadata")):
            order.note_rename(path, target)
        return rename(path, target)

    def replacing(path: Path, target: Path) -> Path:
        order.note_rename(path, target)
        return replace(path, target)

    with (
        mock.patch.object(os, "fsync", syncing),
        mock.patch.object(Path, "rename", renaming),
        mock.patch.object(Path, "replace", replacing),
    ):
        yield order
