"""Loads say how unevenly routers fill ranks."""

import pytest

from titan_moe.config.errors import ConfigError
from titan_moe.planner.load import BALANCED, load_of_counts, read_load


def test_busiest_rank_is_by_layer_for_time_and_over_layers_for_memory() -> None:
    load = load_of_counts("run", {"layers.0": [3, 3, 1, 1], "layers.1": [1, 0, 2, 1]}, 4)
    time, memory = load.busiest(2, 100)
    assert time == pytest.approx((1.5 + 1.5) / 2)
    assert memory == pytest.approx((1.5 + 0.5) / 2)
    assert load.busiest(1, 100) == (1.0, 1.0)


@pytest.mark.parametrize("text", ["balanced", "zipf:0"])
def test_even_popularity_fills_all_ranks_alike(text: str) -> None:
    assert read_load(text, 16).busiest(8, 100) == pytest.approx((1.0, 1.0))


def test_skew_grows_with_the_exponent_and_with_the_ranks() -> None:
    mild, strong = read_load("zipf:0.5", 64), read_load("zipf:1.2", 64)
    assert 1 < mild.busiest(8, 1)[0] < strong.busiest(8, 1)[0] < strong.busiest(32, 1)[0]
    few, many = (read_load("uniform", 64).busiest(8, rows)[0] for rows in (100, 10_000))
    assert 1 < many < few < 1.5
    assert BALANCED.busiest(8, 1) == (1.0, 1.0)


@pytest.mark.parametrize("text", ["zipf", "zipf:-1", "zipf:x", "balanced:2", "hot", "zipf:nan"])
def test_unknown_loads_are_refused_with_those_that_are(text: str) -> None:
    with pytest.raises(ConfigError, match="choose balanced, uniform, zipf:EXPONENT"):
        read_load(text, 8)


@pytest.mark.parametrize(("counts", "says"), [({"layers.0": [1, 2]}, "has 2"), ({}, "no expert")])
def test_counts_of_another_model_are_refused(counts: dict[str, list[float]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_of_counts("run", counts, 4)
