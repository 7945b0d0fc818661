"""Streams of given files, and a slow reader that deals their documents out one by one."""

import itertools
from collections import Counter

from titan_moe.data.bad_documents import BadDocuments
from titan_moe.data.document_order import Assignment, Split
from titan_moe.data.documents import Document, is_held_out
from titan_moe.data.stream_order import StreamOrder


class ListStream:
    """A stream of given files; counts the documents read of each."""

    fingerprint = "list"
    left_out = BadDocuments()

    def __init__(self, files, counts=None):
        self.files, self.num_files = files, len(files)
        self.counts = Counter() if counts is None else counts
        self.place, self.index = 0, 0

    def checksum(self):
        return ""

    def file(self, index):
        one = ListStream([self.files[index]], self.counts)
        one.index = index
        return one

    def read(self, mark=None):
        self.place = mark or 0
        (texts,) = self.files
        while self.place < len(texts):
            self.place += 1
            self.counts[self.index] += 1
            yield Document("list", texts[self.place - 1])

    def mark(self):
        return self.place


def texts_of_files(lengths):
    return [[f"{file}.{number}" for number in range(n)] for file, n in enumerate(lengths)]


def order(files, *, sequences, batch, split=Split.ALL, repeat=False):
    return StreamOrder(
        "list",
        files if isinstance(files, ListStream) else ListStream(files),
        split=split,
        sequences=sequences,
        global_batch_size=batch,
        repeat=repeat,
    )


def slow_partition(files, partition, count, *, train):
    """The endless documents of a partition, by reading all files again and again."""
    first = partition * len(files) // count
    for turn in itertools.count():
        file = (first + turn) % len(files)
        for number, text in enumerate(files[file]):
            if not (train and is_held_out(number, file)):
                yield text


def slow_sequences(files, batch, num_documents, *, train=False):
    """The first documents of every sequence, by dealing each partition's out one by one."""
    count = max(n for n in range(1, 65) if batch % n == 0 and n <= len(files))
    found = [[] for _ in range(batch)]
    for partition in range(count):
        takers = [b for b in range(batch) if b * count // batch == partition]
        documents = slow_partition(files, partition, count, train=train)
        for taker in itertools.islice(itertools.cycle(takers), num_documents * len(takers)):
            found[taker].append(next(documents))
    return found


def read(source, sequence, numbers, *, batch):
    """Documents of a sequence that begins at position 0, by number."""
    places = [Assignment(batch, source.num_partitions).place(sequence, n) for n in numbers]
    return [source.document(position, partition).content for partition, position in places]
