"""The Python standard library's own sources: real text that every machine has."""

import hashlib
import os
import sys
import sysconfig
from pathlib import Path

from titan_moe.config.errors import ConfigError
from titan_moe.data.documents import Document

# Not the library itself: installed packages, caches, and tests (mostly tables of input and output).
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class StdlibCorpus:
    """Every .py file of the standard library in the order of the paths; 13 MB, held in memory."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` None: the interpreter's standard library. ConfigError when it has no file."""
        folder = folder or Path(sysconfig.get_path("stdlib"))
        digest = hashlib.blake2b(digest_size=8)
        self._documents: list[Document] = []
        for path in _python_files(folder):
            content = path.read_bytes()
            try:
                text = content.decode()
            except UnicodeDecodeError:  # A few files are in other encodings.
                continue
            name = path.relative_to(folder).as_posix()
            self._documents.append(Document(f"stdlib/{name}", text))
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
        if not self._documents:
            raise ConfigError(
                [
                    f"training.dataset='stdlib': {folder} holds no .py file (a stripped Python?): "
                    "use 'synthetic', or 'text' with dataset_path"
                ]
            )
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        self.fingerprint = f"stdlib:{version}:{digest.hexdigest()}"

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Document:
        return self._documents[index]


def _python_files(folder: Path) -> list[Path]:
    files: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        files += [Path(place, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda path: path.relative_to(folder).parts)
