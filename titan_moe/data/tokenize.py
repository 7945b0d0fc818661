"""Writing a pre-tokenised copy of a corpus: resumable after a kill, complete or invisible.

All work happens in `<out>.partial`. A shard counts once its `shard-N.json` stands there, which also
says where to read on; the manifest comes last, and then the folder takes its name.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titan_moe.data.bad_documents import BadDocuments, refusal
from titan_moe.data.documents import Corpus, Document, Stream
from titan_moe.data.tokenizer import Tokenizer
from titan_moe.data.tokens import FORMAT, MANIFEST, Manifest, Shard, read_manifest, shard_paths
from titan_moe.runtime.errors import RunError
from titan_moe.runtime.files import parse_json

_PLAN = "plan.json"
_CHUNK = 256  # Documents tokenised side by side; shards end between chunks.

Progress = Callable[[int, int], None]
"""Called with the documents and the tokens finished since the last call."""


@dataclass(frozen=True)
class _Finished:
    """A finished shard, the number of the document after it, the stream's mark there, and the bad
    documents before it."""

    shard: Shard
    next_document: int
    mark: Any
    bad: BadDocuments


def tokenize_corpus(
    source: Corpus | Stream,
    tokenizer: Tokenizer,
    out: Path,
    *,
    progress: Progress,
    workers: int = 1,
    shard_tokens: int = 1 << 26,
    max_bad_documents: float = 1.0,
) -> tuple[Manifest, BadDocuments]:
    """Write all documents of `source`, in their order, into the new folder `out`.

    Goes on with what an earlier, killed call left behind. RunError when `out` is there, when
    the remains are of another source or tokenizer, when there is no document, or when more than a
    share `max_bad_documents` of them have no text.
    """
    if out.exists():
        raise RunError(f"--out {str(out)!r} exists already: nothing is overwritten, choose another")
    work = out.with_name(out.name + ".partial")
    wide = tokenizer.vocab_size > 1 << 16
    plan: dict[str, Any] = {
        "format": FORMAT,
        "source": source.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "dtype": "uint32" if wide else "uint16",
    }
    _begin(work, plan)
    finished = _finished_shards(work)
    for one in finished:
        progress(one.shard.documents, one.shard.tokens)
    if not (work / MANIFEST).exists():
        with ThreadPoolExecutor(workers) as pool:
            chunks = _Chunks(source, finished[-1] if finished else None, max_bad_documents)
            encoded = chunks.encoded(tokenizer, pool)
            writer = _Writer(work, plan["dtype"], shard_tokens, progress)
            while shard := writer.write_shard(encoded, number=len(finished), chunks=chunks):
                finished.append(shard)
        if not finished:
            raise RunError(f"the source {source.fingerprint} has no document: nothing to write")
        shards = [asdict(one.shard) for one in finished]
        _write_json(work / MANIFEST, plan | {"shards": shards})
    for leftover in [work / _PLAN, *work.glob("shard-*.json")]:
        leftover.unlink(missing_ok=True)
    _sync(work)
    work.rename(out)
    _sync(out.parent)
    bad = finished[-1].bad if finished else BadDocuments()
    return read_manifest(out, key="--out"), bad + source.left_out


class _Writer:
    """Writes shards of at least `shard_tokens` tokens, but for the last."""

    def __init__(self, work: Path, dtype: str, shard_tokens: int, progress: Progress) -> None:
        self._work = work
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_tokens = shard_tokens
        self._progress = progress

    def write_shard(
        self,
        encoded: Iterator[list[np.ndarray]],
        *,
        number: int,
        chunks: _Chunks,
    ) -> _Finished | None:
        """Write one shard of what `chunks` gives; None when it is used up."""
        tokens_path, ends_path = shard_paths(self._work, number)
        digest = hashlib.sha256()
        ends: list[int] = []
        total = 0
        with tokens_path.open("wb") as file:
            while total < self._shard_tokens and (arrays := next(encoded, None)):
                content = np.concatenate(arrays).astype(self._dtype).tobytes()
                digest.update(content)
                file.write(content)
                ends += (total + np.cumsum([len(ids) for ids in arrays])).tolist()
                self._progress(len(arrays), ends[-1] - total)
                total = ends[-1]
            _sync_file(file)
        if not ends:
            tokens_path.unlink()
            return None
        content = np.array(ends, "<i8").tobytes()
        with ends_path.open("wb") as file:
            file.write(content)
            _sync_file(file)
        shard = Shard(
            documents=len(ends),
            tokens=total,
            tokens_sha256=digest.hexdigest(),
            ends_sha256=hashlib.sha256(content).hexdigest(),
        )
        finished = chunks.finish(shard)
        _write_json(self._work / f"shard-{number:05d}.json", asdict(finished))
        return finished


class _Chunks:
    """Reads a source in pieces, after a finished shard if there is one."""

    def __init__(
        self, source: Corpus | Stream, after: _Finished | None, max_bad_documents: float
    ) -> None:
        self._source = source
        self._max_bad_documents = max_bad_documents
        self._next = after.next_document if after else 0
        self._bad = after.bad if after else BadDocuments()
        self._mark = after.mark if after else None

    def encoded(self, tokenizer: Tokenizer, pool: ThreadPoolExecutor) -> Iterator[list[np.ndarray]]:
        """Ids of up to _CHUNK documents at a time. RunError at too many bad documents."""
        source = self._source
        documents: Iterator[Document]
        if isinstance(source, Corpus):
            documents = (source[index] for index in range(self._next, len(source)))
        else:
            documents = source.read(self._mark)

        def encode(document: Document) -> np.ndarray:
            content = document.content
            return tokenizer.encode(content) if isinstance(content, str) else content

        while chunk := list(itertools.islice(documents, _CHUNK)):
            self._count(chunk)
            # Threads do: the tokenizers leave Python's lock while they work.
            yield list(pool.map(encode, chunk))

    def finish(self, shard: Shard) -> _Finished:
        """A shard of all that was read since the one before."""
        mark = None if isinstance(self._source, Corpus) else self._source.mark()
        return _Finished(shard, self._next, mark, self._bad)

    def _count(self, chunk: list[Document]) -> None:
        for number, document in enumerate(chunk, self._next + 1):
            if document.problem:
                place = f"{document.name} {document.problem}"
                self._bad += BadDocuments(1, f"{place}, document {number:,}")
        self._next += len(chunk)
        size = len(self._source) if isinstance(self._source, Corpus) else None
        line = refusal(
            f"the source {self._source.fingerprint}",
            self._bad,
            seen=self._next,
            size=size,
            most=self._max_bad_documents,
        )
        if line:
            raise RunError(line)


def _begin(work: Path, plan: dict[str, Any]) -> None:
    """Make the work folder, or see that the one there has the same plan."""
    work.mkdir(parents=True, exist_ok=True)
    # A manifest is there already if only the renaming is left.
    place = work / (MANIFEST if (work / MANIFEST).exists() else _PLAN)
    if not place.exists():
        _write_json(place, plan)
    begun = _read_json(place)
    for key, value in plan.items():
        if begun.get(key) != value:
            raise RunError(
                f"{str(work)!r} was begun with {key}={begun.get(key)!r}, not {value!r}: remove "
                "the folder, or choose another --out"
            )


def _finished_shards(work: Path) -> list[_Finished]:
    finished: list[_Finished] = []
    for number in itertools.count():
        path = work / f"shard-{number:05d}.json"
        if not path.exists():
            return finished
        table = _read_json(path)
        table["bad"] = BadDocuments(**table.get("bad", {}))  # Not there before it was counted.
        finished.append(_Finished(**(table | {"shard": Shard(**table["shard"])})))
    raise AssertionError


def _read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}: remove its folder") from None


def _write_json(path: Path, table: dict[str, Any]) -> None:
    """Write aside, sync, rename."""
    aside = path.with_name(path.name + ".tmp")
    with aside.open("w") as file:
        json.dump(table, file, indent=1)
        _sync_file(file)
    aside.replace(path)
    _sync(path.parent)


def _sync_file(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
