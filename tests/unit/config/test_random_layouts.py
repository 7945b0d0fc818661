"""Whatever is configured is legal, or refused with lines that name key, value and remedy."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.random_layouts import draw, ill_formed


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([0.0, 0.1, 0.3, 1.0]))
def test_a_random_configuration_is_legal_or_refused_with_a_remedy(
    chance: random.Random, wild: float
) -> None:
    assert ill_formed(draw(chance, wild=wild).problems()) == []


def test_the_drawn_configurations_are_of_both_kinds() -> None:
    legal = [not draw(random.Random(seed), wild=0.1).problems() for seed in range(200)]
    assert 40 <= sum(legal) <= 160


def test_a_line_without_a_remedy_is_ill_formed() -> None:
    good = "parallelism.tensor_parallel_degree=3 must divide num_heads=16: choose 1, 2 or 4"
    for bad in (
        good.partition(":")[0],
        good.replace("choose", "note"),
        good.replace("parallelism.", "Error: "),
        f"Traceback\n{good}",
        "",
    ):
        assert ill_formed([bad]) == [bad]
    assert ill_formed([good]) == []
