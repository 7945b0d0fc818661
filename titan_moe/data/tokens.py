"""Pre-tokenised corpora: a folder of flat, memory-mapped arrays with a manifest.

`shard-00000.tokens` holds the ids of its documents one after the other (little-endian uint16 or
uint32, without EOS), `shard-00000.ends` where each document ends (little-endian int64). A folder
without `manifest.json`, which is written last, is not a corpus.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import mmap
import os
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from titan_moe.config.errors import ConfigError
from titan_moe.data.bad_documents import BadDocuments
from titan_moe.data.content import sampled_checksum
from titan_moe.data.documents import Document
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import parse_json
from titan_moe.runtime.records import Count, first_problem

MANIFEST = "manifest.json"
FORMAT = "titan_moe tokens 1"


@dataclass(frozen=True)
class Shard:
    """Size and SHA-256 checksums of one shard's two files."""

    documents: Count
    tokens: Count
    tokens_sha256: str
    ends_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What the folder holds, and what it was made from."""

    format: str
    source: str
    """Fingerprint of the corpus that was tokenised."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    vocab_size: Count
    dtype: Literal["uint16", "uint32"]
    shards: list[Shard]

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """A digest of the whole manifest, and with its checksums of every token."""
        content = json.dumps(asdict(self), sort_keys=True).encode()
        return f"tokens:{hashlib.blake2b(content, digest_size=8).hexdigest()}"


def shard_paths(folder: Path, number: int) -> tuple[Path, Path]:
    """The files of a shard's tokens and of its documents' ends."""
    return folder / f"shard-{number:05d}.tokens", folder / f"shard-{number:05d}.ends"


def read_manifest(folder: Path, *, key: str) -> Manifest:
    """Read the manifest; ConfigError naming `key` when the folder is not a whole corpus."""
    problem = (
        f"make it with titan-moe tokenize --out {folder} --model.tokenizer_path TOKENIZER "
        "--training.dataset DATASET"
    )
    try:
        text = (folder / MANIFEST).read_bytes()
        table = parse_json(text)
        if table.get("format") != FORMAT:
            raise ValueError(f"its format is {table.get('format')!r}, not {FORMAT!r}")
        return TypeAdapter(Manifest).validate_json(text, strict=True)
    except ValidationError as error:
        problem = f"{MANIFEST} is not one of ours ({first_problem(error)}); {problem}"
    except OSError as error:
        problem = f"no {MANIFEST} can be read there ({error.strerror}); {problem}"
    except (ValueError, AttributeError) as error:
        problem = f"{MANIFEST} is not one of ours ({error}); {problem}"
    raise ConfigError([f"{key}={str(folder)!r}: {problem}"])


class TokenCorpus:
    """The documents of a pre-tokenised folder; nothing is read before it is asked for."""

    left_out = BadDocuments()

    def __init__(
        self, folder: Path, *, tokenizer: str | None, key: str = "training.dataset_path"
    ) -> None:
        """`tokenizer`: fingerprint of the one that made the ids (None: any). ConfigError if not."""
        self._folder = folder
        self._manifest = read_manifest(folder, key=key)
        self.fingerprint = self._manifest.fingerprint
        if tokenizer not in (None, self._manifest.tokenizer):
            raise ConfigError(
                [
                    f"{key}={str(folder)!r} was made with tokenizer {self._manifest.tokenizer}, "
                    f"but model.tokenizer_path is {tokenizer}: use that one, or tokenize it again"
                ]
            )
        width = np.dtype(self._manifest.dtype).itemsize
        for number, shard in enumerate(self._manifest.shards):
            sizes = (shard.tokens * width, shard.documents * 8)
            for path, size in zip(shard_paths(folder, number), sizes, strict=True):
                found = path.stat().st_size if path.is_file() else 0
                if found != size:
                    raise ConfigError(
                        [f"{key}={str(folder)!r}: {_wrong_size(path.name, found, size)}"]
                    )

    def checksum(self) -> str:
        shards = range(len(self._manifest.shards))
        return sampled_checksum(
            [path for shard in shards for path in shard_paths(self._folder, shard)]
        )

    def __len__(self) -> int:
        return self._manifest.documents

    def __getitem__(self, index: int) -> Document:
        number = bisect.bisect_right(self._first_documents, index) - 1
        if number not in self._open_shards:
            self._open_shards[number] = self._open_shard(number)
        tokens, ends = self._open_shards[number]
        local = index - self._first_documents[number]
        start, end = [0, *ends.read(max(local - 1, 0), local + 1).tolist()][-2:]
        return Document(f"{self._folder.name}/{index}", tokens.read(start, end))

    @cached_property
    def _first_documents(self) -> list[int]:
        firsts, total = [], 0
        for shard in self._manifest.shards:
            firsts.append(total)
            total += shard.documents
        return firsts

    @cached_property
    def _open_shards(self) -> dict[int, tuple[_Mapped, _Mapped]]:
        return {}

    def _open_shard(self, number: int) -> tuple[_Mapped, _Mapped]:
        tokens_path, ends_path = shard_paths(self._folder, number)
        shard = self._manifest.shards[number]
        dtype = np.dtype(self._manifest.dtype).newbyteorder("<")
        return (
            _Mapped(tokens_path, dtype, shard.tokens),
            _Mapped(ends_path, np.dtype("<i8"), shard.documents),
        )


class _Mapped:
    """A file of numbers, as memory. Behind the end of a file that was cut short this memory reads
    as zeros up to the end of its page, and as SIGBUS after that."""

    def __init__(self, path: Path, dtype: np.dtype, length: int) -> None:
        self._path = path
        self._size = length * dtype.itemsize
        # An empty file cannot be mapped, and a shard of empty documents has one.
        self._map: mmap.mmap | None = None
        if length:
            with path.open("rb") as file:
                self._check(os.fstat(file.fileno()).st_size)
                self._map = mmap.mmap(file.fileno(), self._size, access=mmap.ACCESS_READ)
        self._numbers = np.frombuffer(self._map or b"", dtype)

    def read(self, start: int, end: int) -> np.ndarray:
        """A copy of numbers [start, end). RunError where the file was cut short since."""
        if self._map is None:
            return self._numbers
        self._check(self._map.size())
        numbers = self._numbers[start:end].copy()
        self._check(self._map.size())  # It may have been cut just now.
        return numbers

    def _check(self, found: int) -> None:
        if found != self._size:
            raise RunError(_wrong_size(str(self._path), found, self._size))


def _wrong_size(file: str, found: int, size: int) -> str:
    return (
        f"{file} has {found:,} bytes, not the {size:,} of the manifest: copy the folder again, or "
        "make it anew"
    )


def damaged_files(folder: Path) -> list[str]:
    """Names of the files whose checksum is not the manifest's (reads everything)."""
    damaged = []
    for number, shard in enumerate(read_manifest(folder, key="--verify").shards):
        checksums = (shard.tokens_sha256, shard.ends_sha256)
        for path, checksum in zip(shard_paths(folder, number), checksums, strict=True):
            if not path.is_file() or file_sha256(path) != checksum:
                damaged.append(path.name)
    return damaged


def file_sha256(path: Path) -> str:
    """Checksum of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
