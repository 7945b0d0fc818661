import collections
import itertools

import pytest

from titan_moe.data.documents import HELD_OUT_EVERY, Permutation, count_held_out, is_held_out, mix


def test_mix_is_the_same_on_every_platform():
    # The first two outputs of splitmix64 from state 0, as published with it.
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097])
def test_a_permutation_hits_every_index_once(size):
    permutation = Permutation(size, 7)
    assert sorted(permutation[index] for index in range(size)) == list(range(size))


def test_permutations_differ_by_key_and_shuffle_well():
    size = 1000
    first = [Permutation(size, 0, 0)[index] for index in range(size)]
    assert first != [Permutation(size, 0, 1)[index] for index in range(size)]
    assert first != [Permutation(size, 1, 0)[index] for index in range(size)]
    assert sum(abs(a - b) for a, b in zip(first, range(size), strict=True)) / size == pytest.approx(
        size / 3, rel=0.1
    )
    assert sum(a + 1 == b for a, b in itertools.pairwise(first)) < 8


def test_small_permutations_are_uniform():
    orders = collections.Counter(
        tuple(Permutation(3, key)[index] for index in range(3)) for key in range(6000)
    )
    assert len(orders) == 6 and min(orders.values()) > 700


def test_held_out_share():
    assert [count_held_out(size) for size in (0, 1, 2, 64, 128, 6400)] == [0, 0, 1, 1, 2, 100]
    share = sum(is_held_out(number) for number in range(64_000)) / 64_000
    assert share == pytest.approx(1 / HELD_OUT_EVERY, rel=0.1)
