"""Streams of several files: who reads which document, in which order, and resumes."""

import itertools
import json
import math
import os
import random
import tarfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

import datasets
import pytest

from tests.support.documents import is_held_out, random_texts, write_hub, write_jsonl
from titan_moe.data.corpus import Source
from titan_moe.data.order import Assignment, Document, OutOfDocumentsError, Split
from titan_moe.data.stream import HubStream, StreamOrder
from titan_moe.runtime.errors import RunError

LENGTHS = {
    "equal": [30] * 8,
    "unequal": [50, 3, 1, 17, 40, 1, 25, 9],
    "few": [40, 70, 20],
    "one": [130],
    "many": [7] * 50,
}


class ListStream:
    """A stream of given files, equally large by default; counts the documents read of each."""

    fingerprint = "list"

    def __init__(self, files, counts=None, first=0, sizes=None):
        self.files, self.num_files = files, len(files)
        self.sizes = sizes or [1] * len(files)
        self.counts = Counter() if counts is None else counts
        self.place, self.first = 0, first

    def shard(self, index, count):
        begin, end = (n * len(self.files) // count for n in (index, index + 1))
        return ListStream(self.files[begin:end], self.counts, begin)

    def read(self, mark=None):
        self.place = mark or 0
        documents = [(n, text) for n, file in enumerate(self.files) for text in file]
        for number, text in documents[self.place :]:
            self.place += 1
            self.counts[self.first + number] += 1
            yield Document("list", text)

    def mark(self):
        return self.place


ALL = Split()


def texts_of_files(lengths):
    return [[f"{file}.{number}" for number in range(n)] for file, n in enumerate(lengths)]


def order(files, *, sequences, batch, split=ALL, repeat=False):
    return StreamOrder(
        "list",
        ListStream(files) if isinstance(files, list) else files,
        split=split,
        sequences=sequences,
        global_batch_size=batch,
        repeat=repeat,
    )


def slow_sequences(files, batch, num_documents):
    """The first training documents of every sequence, by dealing each partition's out in turn."""
    count = max(n for n in range(1, 65) if batch % n == 0 and len(files) % n == 0)
    found = [[] for _ in range(batch)]
    for partition in range(count):
        begin, end = (n * len(files) // count for n in (partition, partition + 1))
        texts = [text for file in files[begin:end] for text in file if not is_held_out(text)]
        takers = [b for b in range(batch) if b * count // batch == partition]
        documents = itertools.cycle(texts)
        for taker in itertools.islice(itertools.cycle(takers), num_documents * len(takers)):
            found[taker].append(next(documents))
    return found


def read(source, sequence, numbers, *, batch):
    """Documents of a sequence that begins at position 0, by number."""
    places = [Assignment(batch, source.num_partitions).place(sequence, n) for n in numbers]
    return [source.document(position, partition).content for partition, position in places]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("batch", "ranks"), [(8, 4), (12, 3), (4, 1), (7, 7), (1, 1)])
def test_every_rank_reads_the_documents_of_a_slow_reader(lengths, batch, ranks):
    files = texts_of_files(LENGTHS[lengths])
    expected = slow_sequences(files, batch, 60)
    for rank in range(ranks):
        own = range(rank * batch // ranks, (rank + 1) * batch // ranks)
        source = order(files, sequences=own, batch=batch, repeat=True, split=Split(64))
        # The last sequence far ahead of the first one.
        for sequence in reversed(own):
            assert read(source, sequence, range(60), batch=batch) == expected[sequence]


def test_one_document_in_so_many_of_a_stream_is_held_out():
    files = texts_of_files([400])
    expected = [text for text in files[0] if is_held_out(text, every=5)]
    source = order(files, sequences=[0], batch=1, split=Split(5, held_out=True))
    assert read(source, 0, range(len(expected)), batch=1) == expected


@pytest.mark.parametrize("seed", range(40))
def test_drawn_files_are_read_once_in_equal_shares_and_resumed_on_other_ranks(seed, monkeypatch):
    monkeypatch.setattr(StreamOrder, "CURSOR_EVERY", 8)
    draw = random.Random(seed)
    lengths = [draw.choice([0, 3, 17, 40, 41, 100, 400]) for _ in range(draw.randrange(1, 20))]
    if seed % 4 == 0:
        lengths = [draw.randrange(1, 30)] * len(lengths)
    files, layouts = texts_of_files(lengths), (draw.randrange(1, 5), draw.randrange(1, 5))
    batch = math.prod(layouts) * draw.randrange(1, 3)
    found, places = [[] for _ in range(batch)], []
    for ranks, most in zip(layouts, (draw.randrange(20), 10_000), strict=True):
        before, places = places, []
        for rank in range(ranks):
            own, oldest = range(batch)[rank * batch // ranks : (rank + 1) * batch // ranks], {}
            source = order(ListStream(files, sizes=lengths), sequences=own, batch=batch)
            if before:
                merged = [min(filter(None, of_all)) for of_all in zip(*before, strict=True)]
                source.seek(merged, [0] * source.num_partitions)
            for sequence in own:
                texts = found[sequence]
                with suppress(OutOfDocumentsError):
                    while len(texts) < most:
                        texts += read(source, sequence, [len(texts)], batch=batch)
                assignment = Assignment(batch, source.num_partitions)
                partition, place = assignment.place(sequence, len(texts))
                oldest[partition] = min(place, oldest.get(partition, place))
            places.append(source.mark(oldest))
    assert sorted(itertools.chain(*found)) == sorted(itertools.chain(*files))
    counts = [len(texts) for texts in found]
    assert max(counts) - min(counts) <= 1 + max(counts) // 100


PARTITIONS = {
    1: [400, 400, 3],
    2: [1000, 1009, 995, 1001],
    4: [1000, 1009, 1000, 1001],
    8: [1000] * 1000,
    16: [54] * 16,
}


@pytest.mark.parametrize("count", PARTITIONS)
def test_files_are_partitions_only_where_they_divide_equally(count):
    stream = ListStream([[]] * len(PARTITIONS[count]), sizes=PARTITIONS[count])
    assert order(stream, sequences=[0], batch=16).num_partitions == count


def test_an_empty_partition_is_not_repeated_for_ever():
    empty = order(texts_of_files([0, 0]), sequences=range(1), batch=2, repeat=True)
    with pytest.raises(OutOfDocumentsError):
        read(empty, 0, [0], batch=2)


def test_resume_reads_on_from_the_last_cursor(monkeypatch):
    monkeypatch.setattr(StreamOrder, "CURSOR_EVERY", 8)
    files = texts_of_files([100] * 4)
    source = order(files, sequences=range(4), batch=4)
    read(source, 2, range(75), batch=4)
    mark = json.loads(json.dumps(source.mark({2: 75})))
    assert mark[0] is None and mark[2][0] == 72
    stream = ListStream(files)
    later = order(stream, sequences=[2], batch=4)
    later.seek(mark, [0] * 4)
    assert read(later, 2, range(75, 78), batch=4) == [f"2.{number}" for number in range(75, 78)]
    assert stream.counts == {2: 6}


# --- Streams that `datasets` reads ----------------------------------------------------------------


def hub(path):
    return HubStream(Source("training.", "c4", str(path)))


def texts_of(stream, mark=None):
    return [document.content for document in stream.read(mark)]


def test_hub_stream_is_the_slow_reader_and_goes_on_from_its_mark(tmp_path):
    texts = random_texts(3000)
    write_hub(tmp_path, texts)
    stream = hub(tmp_path)
    assert texts_of(stream) == texts and stream.num_files == 5
    reading = stream.read()
    for _ in range(1700):
        next(reading)
    mark = json.loads(json.dumps(stream.mark()))
    fresh = hub(tmp_path)
    assert texts_of(fresh, mark) == texts[1700:]
    assert texts_of(fresh) == texts
    source = order(fresh, sequences=range(10), batch=10, split=Split(64), repeat=True)
    assert source.fingerprint == "hub:c4:files=5" and source.num_partitions == 5
    assert source.document(300 * 2, 1).name == "c4/1/600"


@pytest.mark.parametrize("kind", ["tar", "arrow"])
def test_tars_and_folders_of_save_to_disk_are_streamed_and_resumed(tmp_path, kind):
    texts = random_texts(40)
    if kind == "arrow":
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path), num_shards=2)
    for file in range(2 * (kind == "tar")):
        with tarfile.open(tmp_path / f"{file}.tar", "w") as tar:
            for number in range(file * 20, file * 20 + 20):
                (tmp_path / "x").write_text(texts[number])
                tar.add(tmp_path / "x", f"{number:04d}.text")
    stream = hub(tmp_path)
    assert texts_of(stream) == texts and len(stream.sizes) == 2
    reading = stream.read()
    assert [next(reading).content for _ in range(25)] == texts[:25]
    assert texts_of(hub(tmp_path), json.loads(json.dumps(stream.mark()))) == texts[25:]


def test_hub_stream_refuses_a_file_that_was_cut_while_it_read(tmp_path):
    """`datasets` reads 10 MiB at a time and takes the end of the file for the end of its data."""
    path = Path(write_jsonl(tmp_path / "a.jsonl", ["x" * 2000] * 8000))
    size = len(path.read_bytes().splitlines(keepends=True)[0])
    reading = hub(tmp_path).read()
    next(reading)
    os.truncate(path, 7000 * size)
    with pytest.raises(RunError, match=f"{path} has changed since the run began"):
        list(reading)


def test_fingerprint_of_a_hub_dataset_holds_its_revision(tmp_path, monkeypatch):
    """The hub is a stub: a local copy's builder that has a commit for its hash."""
    write_jsonl(tmp_path / "hub" / "a.json", ["one", "two"])
    local, asked = datasets.load_dataset_builder, []

    def load_dataset_builder(repository, configuration, revision):
        asked.append((repository, configuration, revision))
        builder = local(str(tmp_path / "hub"))
        builder.hash = revision or "c0ffee"
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    names = ["owner/name:part", "c4@badf00d"]
    streams = [HubStream(Source("training.", name)) for name in names]
    assert [stream.fingerprint for stream in streams] == [
        "hub:owner/name:part:revision=c0ffee",
        "hub:c4@badf00d:revision=badf00d",
    ]
    assert asked == [("owner/name", "part", None), ("allenai/c4", "en", "badf00d")]
