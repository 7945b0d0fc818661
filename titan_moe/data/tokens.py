"""Tokenised corpora: a folder of one flat array of token ids, documents' offsets and a manifest.

`tokens.bin` holds the ids of the documents one after the other (little-endian uint32, without EOS),
`offsets.bin` the first token of each document and the end of the last (little-endian int64). The
folder takes its name when it is complete. Until then all work happens in `<out>.partial`.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from titan_moe.config.errors import ConfigError
from titan_moe.config.job_config import Training
from titan_moe.data.corpus import FileCorpus, Source, first_cause, import_datasets, sampled_checksum
from titan_moe.data.order import Document, digest
from titan_moe.data.stream import HubStream
from titan_moe.data.tokenizer import Tokenizer, load_tokenizer
from titan_moe.runtime.errors import RunError, with_remedy
from titan_moe.runtime.files import LOCK, fsync, replacing, sha256_of, take_folder, write_whole
from titan_moe.runtime.log import progress
from titan_moe.runtime.process_pool import WorkerError, in_fresh_processes

_MANIFEST = "manifest.json"
_PIECES, _DOCUMENTS = 8, 50_000
"""A source is tokenized in so many pieces at least; a large one in pieces of so many documents. A
piece costs a process and most of a second."""
TOKENS, _OFFSETS = "tokens.bin", "offsets.bin"
_TYPES: dict[str, np.dtype[Any]] = {TOKENS: np.dtype("<u4"), _OFFSETS: np.dtype("<i8")}


@dataclass(frozen=True)
class Manifest:
    """The contents of a folder of tokens, and what they were made from."""

    format: Literal["titan_moe tokens 3"]
    source: str
    """Fingerprint of the corpus that was tokenised."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    tokenizer_path: str
    """Names the tokenizer in messages."""
    parse_special_tokens: bool
    """True if special tokens inside the texts were read as tokens."""
    documents: int
    tokens: int
    without_text: int
    """Documents of the corpus that had no text and are empty here."""
    sha256: dict[str, str]
    """The checksum of each file, by the file's name."""


class TokenCorpus:
    """The documents of a tokenised folder; nothing is read before it is asked for."""

    def __init__(self, source: Source, tokenizer: Tokenizer | None) -> None:
        """`tokenizer`: the one that must have made the ids; None: any. Raises ConfigError if the
        folder is not complete or of another tokenizer."""
        folder = self._folder = source.required_path("a folder made by titan-moe tokenize")
        self._manifest = _read_manifest(folder, key=f"{source.key}dataset_path")
        if tokenizer is not None:
            _check_tokenizer(self._manifest, tokenizer, name=source.path_name)
        sizes = {TOKENS: 4 * self._manifest.tokens, _OFFSETS: 8 * (self._manifest.documents + 1)}
        for name, size in sizes.items():
            path = folder / name
            found = path.stat().st_size if path.is_file() else 0
            if found != size:
                raise ConfigError(
                    f"{source.path_name}: {name} has {found:,} bytes, not the {size:,} of "
                    "the manifest: copy the folder again, or make it anew"
                )
        self._files = {name: (folder / name).open("rb", buffering=0) for name in sizes}
        made = asdict(self._manifest)
        del made["tokenizer_path"]
        self.fingerprint = f"tokens:{digest(json.dumps(made, sort_keys=True))}"

    def checksum(self) -> str:
        return sampled_checksum([self._folder / TOKENS, self._folder / _OFFSETS])

    def __len__(self) -> int:
        return self._manifest.documents

    def __getitem__(self, index: int) -> Document:
        start, end = self._read(_OFFSETS, index, index + 2).tolist()
        if not 0 <= start <= end <= self._manifest.tokens:
            raise RunError(
                f"{self._folder / _OFFSETS} is damaged, document {index} is not in the file: copy "
                "the folder again, or make it anew"
            )
        return Document(f"{self._folder.name}/{index}", self._read(TOKENS, start, end))

    def _read(self, name: str, start: int, end: int) -> np.ndarray:
        return read_numbers(self._files[name], _TYPES[name], start, end)


def read_numbers(
    file: BinaryIO, kind: str | np.dtype[Any], start: int, end: int, *, offset: int = 0
) -> np.ndarray:
    """Numbers [start, end) of an array that begins `offset` bytes into a file. RunError if the file
    was cut short since it was opened: mapped memory would read as zeros there, or end the process.
    """
    width = np.dtype(kind).itemsize
    content = os.pread(file.fileno(), (end - start) * width, offset + start * width)
    if len(content) != (end - start) * width:
        raise RunError(f"{file.name} was cut short: copy the folder again, or make it anew")
    return np.frombuffer(content, kind)


def _check_tokenizer(made: Manifest, tokenizer: Tokenizer, *, name: str) -> None:
    """Raises ConfigError if `tokenizer` would give other ids than a folder has."""
    again = "set it so, or tokenize the data again"
    if made.tokenizer != tokenizer.fingerprint:
        path = made.tokenizer_path
        this = f"this run has {tokenizer.path!r}"
        if path == tokenizer.path:
            this, again = "whose files have changed since", "tokenize the data again"
        raise ConfigError(f"{name} was made with model.tokenizer_path={path!r}, {this}: {again}")
    parsed = made.parse_special_tokens
    if parsed != tokenizer.parse_special_tokens:
        line = f"{name} was made with training.parse_special_tokens={str(parsed).lower()}: {again}"
        raise ConfigError(line)


def _read_manifest(folder: Path, *, key: str) -> Manifest:
    try:
        return TypeAdapter(Manifest).validate_json((folder / _MANIFEST).read_bytes(), strict=True)
    except OSError as error:
        problem = f"no {_MANIFEST} can be read there ({error.strerror})"
    except ValidationError:
        problem = f"{_MANIFEST} is not one that titan-moe tokenize writes"
    raise ConfigError(
        f"{key}={str(folder)!r}: {problem}; make it with titan-moe tokenize --out {folder} "
        "--model.tokenizer_path TOKENIZER --training.dataset DATASET"
    )


def damaged_files(folder: Path) -> list[str]:
    """Names of the files with another checksum than the manifest's. Reads everything."""
    found = _read_manifest(folder, key="FOLDER").sha256
    return [
        name
        for name, sha256 in found.items()
        if not (folder / name).is_file() or sha256_of(folder / name) != sha256
    ]


def write_tokens(
    source: FileCorpus | HubStream,
    tokenizer_path: str,
    out: Path,
    *,
    workers: int = 1,
    training: Training | None = None,
) -> Manifest:
    """Write all documents of `source`, in their order, into the new folder `out`.

    Tokenizes pieces of the source in `workers` processes, as the keys of `training` say (None: by
    default). The next call uses the pieces that had finished before a kill. Raises RunError if
    `out` exists, if another process or another program has written beside it, or if the source
    cannot be read or has no document.
    """
    if out.exists():
        raise RunError(f"--out {str(out)!r} exists already: nothing is overwritten, choose another")
    work = out.with_name(f"{out.name}.partial")
    with take_folder(work, "--out"):
        manifest = _write(source, load_tokenizer(tokenizer_path, training), work, workers)
        work.rename(out)
    return manifest


def _write(
    source: FileCorpus | HubStream, tokenizer: Tokenizer, work: Path, workers: int
) -> Manifest:
    """Writes all documents into the locked folder `work`."""
    try:
        encoded = _encoded(source, tokenizer, cache=work / "arrow", workers=workers)
    except Exception as error:  # A disk, a network, a text, no document: each raises its own.
        worker = isinstance(error, WorkerError)  # Its last line is the error.
        cause = str(error).splitlines()[-1] if worker else first_cause(error)
        cause = with_remedy(cause, work)
        raise RunError(
            f"tokenizing {source.fingerprint} failed: {cause}; mend it and run again"
        ) from error
    without_text, total = 0, 0
    with (
        replacing(work / TOKENS) as tokens_path,
        replacing(work / _OFFSETS) as offsets_path,
        tokens_path.open("wb") as tokens_file,
        offsets_path.open("wb") as offsets_file,
    ):
        offsets_file.write(bytes(8))
        for batch in encoded.iter(1000):
            without_text += batch["ids"].count(None)
            ids = [content or b"" for content in batch["ids"]]
            ends = total + np.cumsum([len(content) // 4 for content in ids])
            tokens_file.write(b"".join(ids))
            offsets_file.write(ends.astype(_TYPES[_OFFSETS]).tobytes())
            total = int(ends[-1])
    manifest = Manifest(
        format="titan_moe tokens 3",
        source=source.fingerprint,
        tokenizer=tokenizer.fingerprint,
        tokenizer_path=tokenizer.path,
        parse_special_tokens=tokenizer.parse_special_tokens,
        documents=len(encoded),
        tokens=total,
        without_text=without_text,
        sha256={name: sha256_of(work / name) for name in (TOKENS, _OFFSETS)},
    )
    write_whole(work / _MANIFEST, json.dumps(asdict(manifest), indent=1))
    shutil.rmtree(work / "arrow")
    (work / LOCK).unlink()
    fsync(work)
    return manifest


def _encoded(
    source: FileCorpus | HubStream, tokenizer: Tokenizer, *, cache: Path, workers: int
) -> Any:
    """A `datasets.Dataset` with each document's ids as bytes, null for one without a text."""
    datasets = import_datasets()
    parse = tokenizer.parse_special_tokens
    # Another source or tokenizer does not find the files of this one.
    key = digest(repr((source.fingerprint, source.checksum(), tokenizer.fingerprint, parse)))
    cache.mkdir(parents=True, exist_ok=True)
    table = source.rows().select_columns(source.column)
    pieces = min(len(table), max(_PIECES, len(table) // _DOCUMENTS))
    paths = [cache / f"{key}-{piece}.arrow" for piece in range(pieces)]
    tasks = [
        (table.shard(pieces, piece), tokenizer.path, parse, str(path))
        for piece, path in enumerate(paths)
        if not path.exists()
    ]
    # `datasets` would fork its own workers from this process, which has threads (Arrow's, a
    # caller's): one waited for a lock for ever.
    pool = partial(in_fresh_processes, num_workers=workers) if workers > 1 else starmap
    bar = progress(desc="tokenizing", total=pieces, initial=pieces - len(tasks), unit="piece")
    for _ in pool(_encode_piece, tasks):
        bar.update()
    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(path)) for path in paths])


def _encode_piece(table: Any, tokenizer_path: str, parse: bool, path: str) -> None:
    """Writes the ids of a table's documents to an Arrow file, which appears when it is complete."""
    datasets = import_datasets()
    tokenizer = load_tokenizer(tokenizer_path, Training(parse_special_tokens=parse))

    def ids_of(text: str) -> bytes:
        return tokenizer.encode(text).astype(_TYPES[TOKENS]).tobytes()

    table.map(
        lambda texts: {"ids": [None if text is None else ids_of(text) for text in texts]},
        batched=True,
        input_columns=table.column_names,
        remove_columns=table.column_names,
        features=datasets.Features({"ids": datasets.Value("large_binary")}),
        cache_file_name=path,
        new_fingerprint=Path(path).stem,
    )
