"""Streams of several files: who reads which file, in which order, and how many bytes."""

import builtins
import itertools
import json
import random
from collections import Counter
from dataclasses import asdict, replace

import pytest

from tests.support.documents import write_jsonl
from titan_moe.config.job_config import Training
from titan_moe.data.bad_documents import BadDocuments
from titan_moe.data.build import build_loader
from titan_moe.data.document_order import Assignment, Split
from titan_moe.data.documents import Document, OutOfDocumentsError, is_held_out
from titan_moe.data.hub import HubStream
from titan_moe.data.step_reader import Identity, continue_state, merge_states
from titan_moe.data.stream_order import StreamOrder, count_partitions
from titan_moe.data.tokenizer import load_tokenizer
from titan_moe.runtime.errors import RunError

TOKENIZER = load_tokenizer("bytes")


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


LENGTHS = {
    "equal": [30] * 8,
    "unequal": [50, 3, 0, 17, 40, 1, 25, 9],
    "few": [40, 70, 20],
    "one": [130],
    "many": [7] * 50,
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("batch", "ranks"), [(8, 4), (12, 3), (4, 1), (7, 7), (1, 1)])
def test_every_rank_reads_what_a_slow_reader_deals_out(lengths, batch, ranks):
    files = texts_of_files(LENGTHS[lengths])
    expected = slow_sequences(files, batch, 60, train=True)
    for rank in range(ranks):
        own = range(rank * batch // ranks, (rank + 1) * batch // ranks)
        how = {"sequences": own, "batch": batch, "repeat": True, "split": Split.TRAIN}
        source = order(files, **how)
        # The last sequence far ahead of the first one.
        for sequence in reversed(own):
            assert read(source, sequence, range(60), batch=batch) == expected[sequence]


@pytest.mark.parametrize(
    ("files", "batch", "count"),
    [(1, 64, 1), (8, 64, 8), (1024, 512, 64), (1024, 96, 48), (3, 8, 2), (100, 7, 7), (5, 1, 1)],
)
def test_partitions_divide_the_global_batch(files, batch, count):
    assert count_partitions(files, batch) == count


@pytest.mark.parametrize("batch", [1, 2, 3, 6, 8, 12])
@pytest.mark.parametrize("partitions", [1, 2, 5, 6, 8])
def test_an_assignment_gives_every_document_once(batch, partitions):
    assignment = Assignment(batch, partitions)
    places = [assignment.place(sequence, n) for sequence in range(batch) for n in range(40)]
    assert len(set(places)) == len(places)
    by_partition = Counter(partition for partition, _ in places)
    assert set(by_partition) == set(range(partitions))
    for partition in range(partitions):
        offsets = sorted(offset for number, offset in places if number == partition)
        assert offsets == list(range(len(offsets)))


def test_each_rank_reads_its_share_of_the_files():
    files = texts_of_files([40] * 16)
    total = sum(map(len, files))
    opened = []
    for rank in range(4):
        own = range(rank * 4, rank * 4 + 4)
        stream = ListStream(files)
        source = order(stream, sequences=own, batch=16)
        for sequence in own:
            read(source, sequence, range(40), batch=16)
        assert sum(stream.counts.values()) == total / 4
        opened.append(set(stream.counts))
    assert sorted(file for each in opened for file in each) == list(range(16))


def test_a_partition_that_ran_out_goes_on_in_the_next_ones():
    files = texts_of_files([2, 5, 0, 3])
    source = order(files, sequences=range(2), batch=2, repeat=True)
    assert source.num_partitions == 2
    ring = [text for file in (2, 3, 0, 1) for text in files[file]]
    assert read(source, 1, range(25), batch=2) == [ring[n % 10] for n in range(25)]


def test_without_repetition_a_partition_ends_with_its_files():
    source = order(texts_of_files([2, 5, 0, 3]), sequences=range(2), batch=2)
    assert len(read(source, 0, range(7), batch=2)) == 7
    assert len(read(source, 1, range(3), batch=2)) == 3
    for _ in range(2):
        with pytest.raises(OutOfDocumentsError):
            read(source, 1, [3], batch=2)
    empty = order(texts_of_files([0, 0]), sequences=range(1), batch=2, repeat=True)
    with pytest.raises(OutOfDocumentsError):
        read(empty, 0, [0], batch=2)


def test_training_never_sees_a_stream_s_held_out_documents():
    files = texts_of_files([300, 40, 200])
    everything = [text for file in files for text in file]
    training = order(files, sequences=range(2), batch=2, split=Split.TRAIN)
    validation = order(files, sequences=range(1), batch=1, split=Split.HELD_OUT)
    held_out = read_all(validation, 0, batch=1)
    trained = [text for b in range(2) for text in read_all(training, b, batch=2)]
    assert sorted(trained + held_out) == sorted(everything) and 2 < len(held_out) < 30


def read_all(source, sequence, *, batch):
    found = []
    with pytest.raises(OutOfDocumentsError):
        for number in itertools.count():
            found += read(source, sequence, [number], batch=batch)
    return found


def test_a_resume_reads_on_from_the_last_cursor(monkeypatch):
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


def test_a_place_of_an_earlier_version_is_that_of_the_only_partition():
    source = order(texts_of_files([60]), sequences=range(2), batch=2, repeat=True)
    source.seek([30, 0, 30, 30], [0])
    assert source.fingerprint == "list"
    assert read(source, 1, range(15, 18), batch=2) == ["0.31", "0.33", "0.35"]


def slow_stage(partitions, begins, batch):
    """The documents (partition, position) of each sequence, dealt out one by one."""
    count, found = len(partitions), [[] for _ in range(batch)]
    for number, texts in enumerate(partitions):
        takers = [b for b in range(batch) if b * count // batch == number]
        places = range(begins[number], len(texts))
        for taker, place in zip(itertools.cycle(takers), places, strict=False):
            found[taker].append((number, place))
    for sequence in range(batch if count > batch else 0):
        own = [k for k in range(count) if k * batch // count == sequence]
        found[sequence] = [(k, begins[k] + turn) for turn in range(20) for k in own]
    return found


@pytest.mark.parametrize("batches", [(8, 4, 8), (8, 6, 2, 12), (2, 8, 3), (12, 5, 1, 7)])
def test_a_stage_begins_after_what_a_slow_reader_has_begun(batches):
    draw, files = random.Random(str(batches)), texts_of_files([60] * 12)
    count = count_partitions(12, batches[0])
    partitions = [
        [text for file in range(k * 12 // count, (k + 1) * 12 // count) for text in files[file]]
        for k in range(count)
    ]
    begins, mark = [0] * count, None
    for batch in batches:
        source = order(files, sequences=range(batch), batch=batch)
        source.seek(mark, begins)
        expected = slow_stage(partitions, begins, batch)
        begun = [expected[sequence][: draw.randrange(9)] for sequence in range(batch)]
        for sequence, places in enumerate(begun):
            for number, (partition, position) in enumerate(places):
                place = Assignment(batch, count).place(sequence, number)
                assert place == (partition, position - begins[partition])
                found = source.document(position, partition).content
                assert found == partitions[partition][position]
        identity = Identity("list", 0, batch, 64)
        state = {
            "identity": asdict(identity),
            "first": [begins],
            "rows": {str(b): {"read": [len(begun[b])], "unread": 0} for b in range(batch)},
            "marks": [None],
        }
        following = replace(identity, global_batch_size=batch + 1)
        moved, unread = continue_state(state, identity, following)
        places = [place for of_sequence in begun for place in of_sequence]
        ends = [max([p + 1 for k, p in places if k == n] + [begins[n]]) for n in range(count)]
        assert moved["first"] == [ends]
        assert unread.documents == sum(ends) - sum(begins) - len(places)
        begins, mark = ends, json.loads(json.dumps(source.mark(dict(enumerate(ends)))))


# --- with `datasets` ------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(StreamOrder, "CURSOR_EVERY", 8)
    for file in range(12):
        texts = [f"<{file}.{number}>" * 12 for number in range(20 + 3 * file)]
        write_jsonl(tmp_path / f"part-{file:02d}.json", texts)
    return tmp_path


def loaders(hub, ranks, *, batch=8, repeat=True):
    section = Training(
        dataset="c4", dataset_path=str(hub), seq_len=64, local_batch_size=1, repeat_dataset=repeat
    )
    return [
        build_loader(
            section, TOKENIZER, seed=3, rank=rank, num_ranks=ranks, global_batch_size=batch
        )
        for rank in range(ranks)
    ]


def take(ranks, steps):
    return [
        [batch.tokens_BS.tolist() for loader in ranks for batch in loader.next_step()]
        for _ in range(steps)
    ]


def test_streamed_files_are_the_slow_reader_s(hub):
    files = [
        [json.loads(line)["text"] for line in path.read_text().splitlines()]
        for path in sorted(hub.iterdir())
    ]
    source = StreamOrder(
        "c4",
        HubStream("c4", str(hub), key="training."),
        split=Split.TRAIN,
        sequences=range(8),
        global_batch_size=8,
        repeat=True,
    )
    assert source.fingerprint == "hub:c4:files=12" and source.num_partitions == 8
    assert source.document(4, 1).name == "c4/1/4"
    expected = slow_sequences(files, 8, 90, train=True)
    for sequence in (0, 3, 7):
        found = read(source, sequence, range(sequence == 1, 90), batch=8)
        assert found == expected[sequence]


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (8, 1)])
def test_streams_of_many_files_resume_on_other_ranks(hub, before, after):
    reference = take(loaders(hub, 1), 60)
    first, second = loaders(hub, before), loaders(hub, after)
    assert take(first, 25) == reference[:25]
    state = json.loads(json.dumps(merge_states([loader.state_dict() for loader in first])))
    for loader in second:
        loader.load_state_dict(state)
    assert take(second, 35) == reference[25:]


def staged_names(hub, ranks, batches):
    """Names of the documents read in each stage of 6 steps, and the last position.

    ranks: 0 for as many as sequences."""
    state, before, names = None, None, []
    for batch in batches:
        current = loaders(hub, ranks or batch, batch=batch)
        if state is not None:
            moved, _ = continue_state(state, before, current[0].identity)
            for loader in current:
                loader.load_state_dict(moved)
        steps = [[b for loader in current for b in loader.next_step()] for _ in range(6)]
        names.append([batch.samples[0] for step in steps for batch in step])
        state = json.loads(json.dumps(merge_states([each.state_dict() for each in current])))
        before = current[0].identity
    return names, state


@pytest.mark.parametrize("batches", [(8, 4, 8), (8, 6, 2), (2, 8, 4)])
def test_stages_read_the_same_on_other_ranks_and_nothing_twice(hub, batches):
    names, state = staged_names(hub, 1, batches)
    assert (names, state) == staged_names(hub, 0, batches)
    assert len(state["marks"][0]) == count_partitions(12, batches[0])
    stages = [{name for sequence in stage for name in sequence} for stage in names]
    assert len(set.union(*stages)) == sum(map(len, stages))


def test_a_state_of_a_stream_with_another_number_of_files_is_refused(hub):
    state = merge_states([loader.state_dict() for loader in loaders(hub, 1)])
    write_jsonl(hub / "part-99.json", ["one more"])
    (other,) = loaders(hub, 1)
    with pytest.raises(RunError, match=r"hub:c4:files=12 as.* this run has .*hub:c4:files=13 as"):
        other.load_state_dict(state)


def test_bytes_read_by_a_rank_are_its_share(tmp_path, monkeypatch):
    """Each of 4 ranks reads a quarter of 16 files whole, but for the first file's schema."""
    from datasets.utils import file_utils

    for file in range(16):
        write_jsonl(tmp_path / f"part-{file:02d}.json", ["x" * 999] * 100)
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    counted = count_bytes(monkeypatch, file_utils)
    for rank in range(4):
        loader = loaders(tmp_path, 4, batch=16, repeat=False)[rank]
        counted.clear()
        with pytest.raises(RunError, match="ran out"):
            while True:
                loader.next_step()
        opened = {name for name in counted if counted[name]}
        assert len(opened) == 4
        assert sum(counted.values()) == pytest.approx(total / 4, rel=0.01)


def count_bytes(monkeypatch, module):
    """Bytes by file name that `module` has read since, filled in as it reads."""
    counted = Counter()

    def opening(name, mode="r", *args, **keys):
        file = builtins.open(name, mode, *args, **keys)  # noqa: SIM115
        return Counting(file, str(name), counted) if "b" in mode else file

    monkeypatch.setattr(module, "open", opening, raising=False)
    return counted


class Counting:
    """A binary file that counts what is read of it."""

    def __init__(self, file, name, counted):
        self.file, self.name, self.counted = file, name, counted

    def __getattr__(self, attribute):
        return getattr(self.file, attribute)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def read(self, size=-1):
        return self._count(self.file.read(size))

    def readline(self, size=-1):
        return self._count(self.file.readline(size))

    def _count(self, content):
        self.counted[self.name] += len(content)
        return content
