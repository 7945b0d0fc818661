"""The documents of a stream in the order of training or of validation."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from titan_moe.data.document_order import Assignment, Split
from titan_moe.data.documents import Document, OutOfDocumentsError, Stream, is_held_out
from titan_moe.data.position import damaged

# A rank that reads all partitions has a file of each open, with a piece of some 10 MB in memory.
_MOST_PARTITIONS = 64


def count_partitions(num_files: int, global_batch_size: int) -> int:
    """The largest divisor of the global batch size up to the number of files and to 64.

    A divisor, so that all partitions are read equally fast.
    """
    most = min(num_files, global_batch_size, _MOST_PARTITIONS)
    return next(count for count in range(most, 0, -1) if global_batch_size % count == 0)


class Cursor(NamedTuple):
    """A place in a partition: before the document at `position`, which is document `number` or a
    later one of its file, after `files` whole files. `stream` is that file's own mark."""

    position: int
    files: int
    number: int
    stream: Any


class StreamOrder:
    """A stream of F files in P partitions, of which a data rank reads those of its sequences.

    Partition k begins with file floor(k F / P) and goes on, file by file, to the next partition's
    first. With `repeat` it goes on into the next partition and so around all files, at its own
    pace: in the long run every partition reads every file equally often. P follows from the global
    batch at which a run begins, and stays when a training stage changes that.

    The price: where there are fewer partitions than data ranks, ranks share one, and each of them
    reads all of it.
    """

    size: int | None = None
    CURSOR_EVERY = 512  # Positions; a resume reads at most these, and a mark costs about 20 us.

    def __init__(
        self,
        name: str,
        stream: Stream,
        *,
        split: Split,
        sequences: Collection[int],
        global_batch_size: int,
        repeat: bool,
    ) -> None:
        self.name = name
        self.fingerprint = stream.fingerprint
        self.left_out = stream.left_out
        self.checksum = stream.checksum
        if stream.num_files > 1:
            self.fingerprint += f":files={stream.num_files}"
        self._how = _Reading(stream, split, repeat)
        self._sequences = sequences
        self._global_batch_size = global_batch_size
        self.seek(None, [0] * count_partitions(stream.num_files, global_batch_size))

    @property
    def num_partitions(self) -> int:
        return self._num_partitions

    def document(self, position: int, partition: int = 0) -> Document:
        return self._partitions[partition].document(position)

    def mark(self, oldest: Mapping[int, int]) -> Any:
        """By partition; None where this rank reads nothing."""
        return [
            list(self._partitions[number].mark(oldest[number])) if number in oldest else None
            for number in range(self._num_partitions)
        ]

    def seek(self, mark: Any, first: Sequence[int]) -> None:
        if mark and isinstance(mark[0], int):
            mark = [mark]  # Of a version that knew one partition.
        self._num_partitions = len(first)
        assignment = Assignment(self._global_batch_size, len(first))
        wanted: dict[int, list[int]] = {}
        for sequence in self._sequences:
            for number in assignment.partitions(sequence):
                wanted.setdefault(number, []).append(sequence)
        num_files = self._how.stream.num_files
        self._partitions: dict[int, _Partition] = {}
        if mark and any(number >= len(mark) or mark[number] is None for number in wanted):
            raise damaged(f"marks of {self.name} lack a partition of {len(first)}")
        for number, sequences in wanted.items():
            begin, end = (at * num_files // len(first) for at in (number, number + 1))
            taking = assignment.sequences(number)
            self._partitions[number] = _Partition(
                self._how,
                range(begin, end),
                start=Cursor(*mark[number]) if mark else Cursor(0, 0, 0, None),
                first=first[number],
                takers=len(taking),
                wanted=[sequence - taking.start for sequence in sequences],
            )


@dataclass(frozen=True)
class _Reading:
    """What all partitions of a stream have in common."""

    stream: Stream
    split: Split
    repeat: bool


class _Partition:
    """Reads the files of one partition and keeps the documents of this rank's sequences."""

    def __init__(
        self,
        how: _Reading,
        files: range,
        *,
        start: Cursor,
        first: int,
        takers: int,
        wanted: Sequence[int],
    ) -> None:
        """Reads on from `start`. Of the documents from position `first` on, `takers` sequences take
        one each in turn; `wanted` are this rank's, of range(takers)."""
        self._how = how
        self._files = files
        self._first = first
        self._takers = takers
        self._waiting: dict[int, deque[tuple[int, Document]]] = {taker: deque() for taker in wanted}
        self._marks = deque([start])
        self._position, self._finished = start.position, start.files
        self._open(start.number, start.stream)

    def document(self, position: int) -> Document:
        waiting = self._waiting[(position - self._first) % self._takers]
        while True:
            while waiting:
                found, document = waiting.popleft()
                if found == position:
                    return document
            if position < self._position:
                raise damaged(f"document {position:,} lies before {self._position:,}, its place")
            self._read_one()

    def mark(self, oldest: int) -> Cursor:
        """The last cursor at or before `oldest`; those before it are forgotten."""
        while len(self._marks) > 1 and self._marks[1].position <= oldest:
            self._marks.popleft()
        return self._marks[0]

    def _open(self, number: int, mark: Any) -> None:
        """Read on in the file after the finished ones, which is document `number` of it."""
        self._number = number
        self._file = (self._files.start + self._finished) % self._how.stream.num_files
        self._stream = self._how.stream.file(self._file)
        self._documents: Iterator[Document] = self._stream.read(mark)

    def _next_file(self) -> None:
        finished = self._finished + 1
        if not self._how.repeat:
            if finished >= len(self._files):
                raise OutOfDocumentsError
        elif self._position == 0 and finished >= self._how.stream.num_files:
            raise OutOfDocumentsError  # No file holds a document.
        self._finished = finished
        self._open(0, None)

    def _read_one(self) -> None:
        document = next(self._documents, None)
        if document is None:
            self._next_file()
            return
        number = self._number
        self._number += 1
        if self._belongs_elsewhere(number):
            return
        taker = (self._position - self._first) % self._takers
        if taker in self._waiting:
            file = f"/{self._file}" if self._how.stream.num_files > 1 else ""
            problem = document.problem
            if problem:
                problem += f" (file {self._file + 1}, row {number + 1})"
            named = Document(f"{document.name}{file}/{number}", document.content, problem)
            self._waiting[taker].append((self._position, named))
        self._position += 1
        if self._position % StreamOrder.CURSOR_EVERY == 0:
            mark = self._stream.mark()
            self._marks.append(Cursor(self._position, self._finished, self._number, mark))

    def _belongs_elsewhere(self, number: int) -> bool:
        """Whether the other half of a split has document `number` of the open file."""
        split = self._how.split
        return split is not Split.ALL and (
            is_held_out(number, self._file) != (split is Split.HELD_OUT)
        )
