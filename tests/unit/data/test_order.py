import itertools
import zlib

import pytest

from titan_moe.data.builtin import SyntheticCorpus
from titan_moe.data.order import Assignment, CorpusOrder, Permutation, Split, mix


def test_mix_is_splitmix64():
    # The first two outputs of splitmix64 from state 0, as published with it.
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
    held_out = sum(mix(zlib.crc32(b"%d" % n)) % 64 == 0 for n in range(64_000))
    assert held_out == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097])
def test_permutation_hits_every_index_once(size):
    permutation = Permutation(size, 7)
    assert sorted(permutation[index] for index in range(size)) == list(range(size))


def test_permutations_differ_by_key_and_shuffle_well():
    size = 1000
    first = [Permutation(size, 0, 0)[index] for index in range(size)]
    assert first != [Permutation(size, 0, 1)[index] for index in range(size)]
    assert first != [Permutation(size, 1, 0)[index] for index in range(size)]
    distance = sum(abs(a - b) for a, b in zip(first, range(size), strict=True)) / size
    assert distance == pytest.approx(size / 3, rel=0.1)
    assert sum(a + 1 == b for a, b in itertools.pairwise(first)) < 8


@pytest.mark.parametrize("batch", [1, 2, 3, 6, 8, 12])
@pytest.mark.parametrize("partitions", [1, 2, 5, 6, 8])
def test_assignment_gives_every_document_once_and_reads_partitions_equally_fast(batch, partitions):
    assignment = Assignment(batch, partitions)
    places = [assignment.place(sequence, n) for sequence in range(batch) for n in range(40)]
    assert len(set(places)) == len(places)
    assert {partition for partition, _ in places} == set(range(partitions))
    for partition in range(partitions):
        offsets = sorted(offset for number, offset in places if number == partition)
        assert offsets == list(range(len(range(partition, batch * 40, partitions))))
    for sequence in range(batch):
        own = places[sequence * 40 : sequence * 40 + 40]
        assert {assignment.sequence(*place) for place in own} == {sequence}
        assert sorted(assignment.partitions(sequence)) == sorted({number for number, _ in own})


@pytest.mark.parametrize("every", [64, 8, 2])
@pytest.mark.parametrize("size", [2, 5, 64, 200])
def test_training_never_sees_held_out_documents(size, every):
    corpus = SyntheticCorpus(0, num_documents=size)

    def read(split, seed):
        order = CorpusOrder("synthetic", corpus, split=split, seed=seed, epochs=1)
        return [order.document(position).content for position in range(order.size)]

    held_out = read(Split(every, held_out=True), None)
    assert len(held_out) == max(1, size // every)
    for seed in (0, 1):
        read_once = sorted(read(Split(every), seed) + held_out)
        assert read_once == sorted(corpus[index].content for index in range(size))


def test_the_same_documents_are_held_out_as_ever():
    corpus, split = SyntheticCorpus(0, num_documents=300), Split(64, held_out=True)
    order = CorpusOrder("synthetic", corpus, split=split, seed=None, epochs=1)
    assert [order.index(position) for position in range(order.size)] == [40, 133, 83, 46]


def test_each_epoch_has_another_order():
    corpus = SyntheticCorpus(0, num_documents=100)
    order = CorpusOrder("synthetic", corpus, split=Split(64), seed=0, epochs=None)
    epochs = [
        [order.document(epoch * order.size + index).content for index in range(order.size)]
        for epoch in range(3)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert order.document(5).content == epochs[0][5]  # After a jump back.
