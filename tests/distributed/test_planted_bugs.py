"""The gradient gate finds mistakes of one line, names the tensor, and blames nothing else."""

import re
from fnmatch import fnmatchcase

import pytest

from tests.support.catching import BUGS, caught, judge
from tests.support.gates import SAMPLE, Gates
from tests.support.planting import Bug
from tests.support.tiers import split
from titan_moe.verify.layouts.layouts import AXES, OPTIONS, Layout, parse

# One for each mechanism, on two ranks.
QUICK = [
    "replicas counted again in the norm",  # data parallelism
    "each rank divides by its own targets",  # what a gradient is divided by
    "parameters kept gathered over the update",  # accumulation
    "experts left out of the norm under ep",  # the norm
    "rows come home off by one shard",  # the dispatcher
    "router's gradient not summed over tp",  # tensor parallelism
    "the ring's last block skipped",  # context parallelism
    "tokens counted twice by recompute",  # recomputation
    "recompute routes anew",
    "a schedule divides by its microbatches",  # pipelines
    "the output layer's gradient of the last chunk alone",  # the loss in chunks
    "routing biases from a rank's own tokens",  # balance
    "weight decay on norms",  # the optimizer
    "a tie not summed between the ends of a pipeline",  # tied embeddings
    "multi-token prediction's loss lost",
    "of a token's experts on a rank, the first one's output alone",  # deduplication
    "buffers come home off by one rank",  # bounded buffers
]


@pytest.mark.parametrize("name", split(BUGS, QUICK))
def test_a_planted_bug_is_caught(gates: Gates, name: str, monkeypatch):
    caught(gates, BUGS[name], BUGS[name].caught_on, monkeypatch)


HARMLESS = [name for name, bug in BUGS.items() if bug.harmless_on]


@pytest.mark.parametrize("name", split(HARMLESS, HARMLESS[:1], HARMLESS[1::6]))
def test_a_layout_without_its_axis_passes(gates: Gates, name: str, monkeypatch):
    bug = BUGS[name]
    result, _ = judge(gates(bug.family), bug, bug.harmless_on, monkeypatch)
    assert result.passed, "\n".join([*result.lines, result.traceback])


def holds(sampled: Layout, layout: Layout) -> bool:
    """Whether a layout is a sampled one with fewer ranks, and fewer axes. How gradients accumulate
    matters only to a bug that is not caught in each microbatch."""
    return all(sampled.size(axis) >= layout.size(axis) for axis in AXES) and all(
        getattr(sampled, option) == getattr(layout, option)
        for option in OPTIONS
        if layout.has(option)
        and (option != "accumulation" or layout.accumulation != Layout.accumulation)
    )


def in_the_sample(bug: Bug) -> list[str]:
    return [text for text in SAMPLE if holds(parse(text), parse(bug.caught_on))]


@pytest.mark.parametrize("name", BUGS)
def test_the_sample_has_what_a_bug_shows_on(name: str):
    assert in_the_sample(BUGS[name])


@pytest.mark.full
@pytest.mark.parametrize("name", BUGS)
def test_the_sample_itself_catches_it(gates: Gates, name: str, monkeypatch):
    text, *_ = in_the_sample(BUGS[name])
    result, found = judge(gates(BUGS[name].family), BUGS[name], text, monkeypatch)
    assert result.status == "failed"
    for pattern in BUGS[name].named:
        # Of more ranks, another ratio.
        quantity = re.sub("^step 0, rank 1: ", "", pattern).rstrip("*").split("exactly")[0]
        assert any(fnmatchcase(f"{d.quantity} {d.name}", f"{quantity}*") for d in found), pattern


@pytest.mark.slow
def test_a_rank_that_dies_is_told_in_a_line(gates: Gates, monkeypatch):
    """A recomputation that counts its tokens again."""
    bug = BUGS["recompute routes anew"]._replace(wrong="return route(scores_BSE)")
    result, _ = judge(gates(bug.family), bug, bug.caught_on, monkeypatch)
    (line,) = result.lines
    assert "RuntimeError: a recomputed forward changed moe.rows_sent, moe.router.tok" in line
