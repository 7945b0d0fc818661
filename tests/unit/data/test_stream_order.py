"""Streams of several files: who reads which document, and in which order."""

import itertools
import json
import random
from collections import Counter
from dataclasses import asdict, replace

import pytest

from tests.support.streams import ListStream, order, read, slow_sequences, texts_of_files
from titan_moe.data.document_order import Assignment, Split
from titan_moe.data.documents import OutOfDocumentsError
from titan_moe.data.step_reader import Identity, continue_state
from titan_moe.data.stream_order import StreamOrder, count_partitions

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
